"""The model object: questions go to its profile, work goes to its session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from interp_core import functions
from interp_core.address import Address
from interp_core.attribution import attribute
from interp_core.chat_spans import ChatTokens, chat_spans
from interp_core.direct import direct_attribution
from interp_core.errors import InterpError, ModelUnavailable, RequestError
from interp_core.facts import ModelFacts
from interp_core.gradients import GradSupport
from interp_core.points import PointSpec
from interp_core.registry import own_configurations
from interp_core.residual import ResidualBasis
from interp_core.scalars import whole_number
from interp_core.session import Session
from interp_core.steering import steer
from interp_core.sweeps import sweep
from interp_core.text import TextStream
from interp_core.tokenization import chat_ids, chat_text, has_tokenizer, load_tokenizer, text_ids, token_strings

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.aio import AioModel
    from interp_core.harvest_reader import Harvest
    from interp_core.profile import ModelProfile
    from interp_core.results import LensResult
    from interp_core.verdicts import Verification

__all__ = ["InterpModel"]


class InterpModel:
    """A model on a backend. Made by ``load_model``; lazy until ``warmup()`` or first use.

    Every question is answered from configuration. Use it as a context manager to shut it down at the
    end; ``model.aio`` is the same surface with ``await``.

    Attributes:
        profile: everything that is known before a weight is loaded.
        session: the running side.
    """

    def __init__(
        self,
        profile: ModelProfile,
        session: Session | None = None,
        *,
        tokenizer: Any = None,
        in_memory: bool = False,
    ) -> None:
        self.profile = profile
        self.session = session or Session(profile)
        self._tokenizer: Any = tokenizer
        # Where a model came from in memory, its id is a name, and no checkpoint need be there.
        self._checkpoint = not in_memory or Path(profile.model_id).is_dir()

    # What it is.

    @property
    def model_id(self) -> str:
        """What ``load_model`` was given."""
        return self.profile.model_id

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.profile.backend

    @property
    def facts(self) -> ModelFacts:
        """What the configuration says."""
        return self.profile.facts

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return self.facts.n_layers

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.facts.d_model

    @property
    def n_heads(self) -> int:
        """Query heads of the first attention layer."""
        return self.facts.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads of the first attention layer."""
        return self.facts.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a query and key head."""
        return self.facts.head_dim

    @property
    def d_mlp(self) -> int:
        """Neurons of the first dense MLP."""
        return self.facts.d_mlp

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.facts.vocab_size

    @property
    def hooks_available(self) -> bool:
        """Whether it can capture or steer at all."""
        return self.profile.spec.hooks

    @property
    def graph_replay(self) -> bool:
        """Whether a compiled or replayed graph runs instead of Python forwards."""
        return self.profile.spec.graph_replay

    @property
    def static_points(self) -> tuple[Address, ...]:
        """Addresses with a declared tap; empty unless the backend compiles its forward."""
        return self.profile.static_points

    @property
    def static_writes(self) -> tuple[Address, ...]:
        """Addresses with a declared write site."""
        return self.profile.static_writes

    @property
    def grad_support(self) -> GradSupport:
        """Whether gradients flow, why not, and what would open it."""
        return self.profile.grad_support

    @property
    def residual_basis(self) -> ResidualBasis:
        """What the residual stream is, and what may be assumed of it."""
        return self.profile.residual_basis

    def points(self) -> tuple[PointSpec, ...]:
        """Every point: the general ones, then what the trunk adds."""
        return self.profile.points()

    def address(self, value: object) -> Address:
        """One address that exists on this model; see :meth:`ModelProfile.address`."""
        return self.profile.address(value)

    def supports(self, what: object) -> bool:
        """Whether a capability, by name, or an address, for reading, is served."""
        return self.profile.supports(what)

    def refusal(self, what: object, *, write: bool = False) -> InterpError | None:
        """The error that using ``what`` would raise, or ``None``."""
        return self.profile.refusal(what, write=write)

    def describe(self) -> dict[str, Any]:
        """One JSON-able record of everything above."""
        return self.profile.describe()

    # Its life.

    def warmup(self) -> Self:
        """Load the weights now rather than at first use.

        Raises:
            BackendUnavailable: the backend cannot run here.
            ModelUnavailable: the weights are missing or corrupt.
        """
        self.session.warmup()
        return self

    def shutdown(self) -> None:
        """Free memory and processes. May be called twice; the model cannot be used afterwards."""
        self.session.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "warm" if self.session.warm else "not loaded yet"
        return f"<InterpModel {self.model_id!r} on {self.backend}, {self.n_layers} layers x {self.d_model}, {state}>"

    @property
    def aio(self) -> AioModel:
        """The same surface with ``await`` and asynchronous iterators."""
        from interp_core.aio import AioModel

        return AioModel(self)

    # Tokens.

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer.

        Raises:
            ModelUnavailable: the checkpoint has none.
        """
        if self._tokenizer is None and not self._checkpoint:
            raise ModelUnavailable("this model came from memory, without a tokenizer: load_model(model, tokenizer=...)")
        if self._tokenizer is None:
            trusted = bool(self.profile.options.get("trust_remote_code", False))
            own = () if self.profile.architecture is None else (self.profile.architecture,)
            classes = own_configurations(own)
            self._tokenizer = load_tokenizer(self.model_id, trust_remote_code=trusted, classes=classes)
        return self._tokenizer

    def to_tokens(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Tensor | list[list[int]]:
        """Ids of a text as ``[1, seq]``; of texts as ``[batch, seq]``, or as lists if lengths differ."""
        return text_ids(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def to_string(self, ids: Any) -> str | list[str]:
        """Text of ids, special tokens included; of a ``[batch, seq]`` a list of texts."""
        rows, single = _id_rows(ids)
        texts = [str(self.tokenizer.decode(row, clean_up_tokenization_spaces=False)) for row in rows]
        return texts[0] if single else texts

    def to_str_tokens(self, text_or_ids: Any) -> list[str]:
        """Each token of one text, or of one row of ids, as text."""
        ids = self.to_tokens(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
        rows, _ = _id_rows(ids)
        if len(rows) != 1:
            raise RequestError("to_str_tokens takes one text or one row of ids")
        return token_strings(self.tokenizer, rows[0])

    def chat_tokens(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **options: Any) -> Tensor:
        """Ids ``[1, seq]`` of a conversation, through the checkpoint's own chat template.

        A format that is Python code rather than a template is used only with ``trust_remote_code=True``. ``options``
        go to the template, or to that code, such as ``enable_thinking=False`` or ``thinking_mode="thinking"``.
        """
        trusted = bool(self.profile.options.get("trust_remote_code", False))
        return chat_ids(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            model_id=self.model_id,
            trust=trusted,
            **options,
        )

    def chat_spans(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **options: Any) -> ChatTokens:
        """Ids of a conversation as :meth:`chat_tokens` gives them, and which message each token is of.

        Raises:
            RequestError: as :meth:`chat_tokens`; or the tokenizer does not know where in a text its tokens are.
        """
        trusted = bool(self.profile.options.get("trust_remote_code", False))

        def render(some: Sequence[Any], opening: bool) -> str:
            return chat_text(
                self.tokenizer,
                some,
                add_generation_prompt=opening,
                model_id=self.model_id,
                trust=trusted,
                **options,
            )

        return chat_spans(self.tokenizer, messages, render, add_generation_prompt=add_generation_prompt)

    def text_stream(self, prompt: Sequence[int], stop: tuple[str, ...] = ()) -> TextStream | None:
        """A decoder of new tokens after ``prompt``; ``None`` where the checkpoint has no tokenizer.

        Raises:
            ModelUnavailable: the tokenizer is broken, or there is none and stop strings need one.
        """
        # A tokenizer that is there and broken is an error; only a checkpoint without one goes without text.
        own = self._checkpoint and has_tokenizer(self.model_id)
        if not stop and self._tokenizer is None and not own:
            return None
        return TextStream(self.tokenizer, prompt, stop)

    # Work.

    def decode_residuals(self, rows: Any, *, reduction: Any = None) -> Tensor:
        """Logits ``[rows, vocab]`` of residual rows ``[rows, d_model]``, with the family's own softcap and multiplier.

        On a trunk of several streams rows are ``[rows, streams, d_model]``, and a ``reduction`` is named (see
        :meth:`logit_lens`).

        Raises:
            CapabilityUnsupported: a residual row of this trunk is not what the unembedding reads.
            RequestError: ``rows`` has another shape.
        """
        return functions.unembed_rows(self, rows, raw=False, reduction=reduction)

    def logit_lens(
        self, tokens: Any, layers: Sequence[int] | None = None, top_k: int = 5, **options: Any
    ) -> LensResult:
        """What each layer's residual would say if the trunk ended there; see :func:`interp_core.lens.logit_lens`."""
        from interp_core.lens import logit_lens

        return logit_lens(self, tokens, layers, top_k, **options)

    def verify(self, tokens: Any = None, *, progress: bool = False) -> Verification:
        """Run the identities on this very model and report each point; see :func:`interp_core.verify.verify`."""
        from interp_core.verify import verify

        return verify(self, tokens, progress=progress)

    def harvest(self, dataset_or_texts: Any, points: Sequence[Any], out_dir: str | Path, **options: Any) -> Harvest:
        """Capture points of a whole data set into a folder; see :func:`interp_core.harvest`."""
        from interp_core.harvesting import harvest

        return harvest(self, dataset_or_texts, points, out_dir, **options)

    run_with_cache = functions.run_with_cache
    capture_generation = functions.capture_generation
    generate = functions.generate
    generate_stream = functions.generate_stream
    capture_attention = functions.capture_attention
    attribute = attribute
    direct_attribution = direct_attribution
    sweep = sweep
    steer = steer


def _id_rows(ids: Any) -> tuple[list[list[int]], bool]:
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    rows = values if isinstance(values, (list, tuple)) else [values]
    nested = bool(rows) and all(isinstance(row, (list, tuple)) for row in rows)
    found = [[whole_number(i) for i in row] for row in (rows if nested else [rows])]
    if any(i is None or i < 0 for row in found for i in row):
        raise RequestError(f"ids are whole numbers from 0, not {ids!r}")
    return [[i for i in row if i is not None] for row in found], not nested or len(found) == 1
