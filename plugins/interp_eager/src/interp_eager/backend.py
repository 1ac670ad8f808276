"""The eager backend: a transformers model in this process, with hooks for the time of a request."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interp_core.address import Address
from interp_core.checkpoint import end_tokens
from interp_core.errors import AddressError, BackendUnavailable, InterpError, RequestError, unknown_name
from interp_core.expressions import Binding
from interp_core.layout import Layout
from interp_core.logits import finished
from interp_core.profile import ModelProfile
from interp_core.requests import ForwardRequest, ForwardResult, GenerationRun
from interp_core.trunk import trunk_of
from interp_eager.attention import Watched, watched
from interp_eager.batching import forwards, generation_refusal, generations, padding_refusal
from interp_eager.caches import cache_keyword, empty_cache
from interp_eager.carried import Place, places
from interp_eager.collect import Chunk, Collector
from interp_eager.compiled import refuse_compiled
from interp_eager.generation import EagerRun, together
from interp_eager.hooks import installed
from interp_eager.program import Program, compile_program
from interp_eager.taps import Taps
from interp_eager.training import refuse_dropout
from interp_eager.weights import load_weights

__all__ = ["EagerBackend"]


class EagerBackend:
    """Executes validated requests on a transformers model. See :class:`interp_core.backend.Backend`."""

    def __init__(self, profile: ModelProfile, options: Mapping[str, Any], model: Any = None) -> None:
        self.trunk = trunk_of(profile.architecture, profile.backend)
        self.profile = profile
        self.options = options
        self.model: Any = None
        self._given = model
        self.layout: Layout = Layout({})
        self.end_tokens: frozenset[int] = frozenset()
        self.takes_positions = False
        self.places: tuple[Place, ...] = ()
        self._unequal: str | None = None
        self._keeps_logits = False

    @property
    def device(self) -> torch.device:
        """Where the input embeddings are."""
        found: torch.device = next(self.model.get_input_embeddings().parameters()).device
        return found

    def warmup(self) -> None:
        """Load the weights, unless the model was given, and find the modules."""
        with _ordinary(grad=True):
            model = load_weights(self.profile, self.options) if self._given is None else self._given
        if self.profile.facts.structure_known:
            self.layout = self.trunk.layout(model, self.profile.facts)
        taken = inspect.signature(model.forward).parameters
        self._keeps_logits, self.takes_positions = "logits_to_keep" in taken, "position_ids" in taken
        stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.end_tokens = end_tokens(self.profile.model_id, stated, self.profile.facts.eos_token_ids)
        self.places = places(model)
        self.model = model

    def shutdown(self) -> None:
        """Drop the model."""
        self.model, self._given, self.layout, self.places = None, None, Layout({}), ()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """One forward per batch of requests, padded on the right where prompts are of unequal length."""
        results: list[ForwardResult] = []
        for batch in forwards(requests, unequal=not padding_refusal(self.model, self.profile.facts)):
            results.extend(self._forward(batch))
        return results

    def generate(self, request: ForwardRequest) -> EagerRun:
        """Begin a generation."""
        return together(self, [request])[0]

    def generate_together(self, requests: Sequence[ForwardRequest]) -> list[Mapping[int, GenerationRun]]:
        """Begin generations in batches, of unequal prompts where the trunk's cache allows for it."""
        found = generations(requests, unequal=not self.unequal_refusal, longest=self.profile.facts.max_positions)
        return [dict(zip(group, together(self, [requests[i] for i in group]), strict=True)) for group in found]

    def unembed(self, rows: Any, *, raw: bool) -> Tensor:
        """Logits of residual rows through the final norm, the head's own layers and the unembedding."""
        head = self.layout.module("head" if self.layout.has("head", None) else "lm_head", None)
        with torch.set_grad_enabled(torch.is_tensor(rows) and rows.requires_grad):
            # A device map may keep the two on different devices.
            hidden = _moved(rows, head)
            if hidden.dim() == 3:
                hidden = self.trunk.contract(hidden, self.layout)
            if self.profile.facts.halved_after(self.profile.facts.n_layers - 1):
                hidden = 0.5 * hidden
            if self.profile.facts.final_norm:
                norm = self.layout.module("final_norm", None)
                hidden = norm(_moved(hidden, norm))
            if self.profile.facts.head_scale != 1.0:
                hidden = hidden * self.profile.facts.head_scale
            if self.layout.has("head_transform", None):
                transform = self.layout.module("head_transform", None)
                hidden = transform(_moved(hidden, transform))
            logits: Tensor = head(_moved(hidden, head))
            if not raw:
                logits = finished(logits, self.profile.facts)
            return logits.to(rows.device)

    def through(self, role: str, layer: int | None, rows: Any) -> Tensor:
        """Rows ``[rows, width]`` through the module of a role."""
        module = self.layout.module(role, layer)
        with torch.no_grad():
            out: Tensor = module(_moved(rows, module))
        return out.to(device=rows.device, dtype=rows.dtype)

    def new_cache(self, *, rows: int = 1, windows: bool = True) -> Any:
        """An empty cache of the model's own kind for ``rows`` prompts; without ``windows``, one with every column.

        Raises:
            RequestError: the model keeps none: one that is given would be passed over, and each token read alone.
        """
        if not cache_keyword(self.model):
            raise RequestError(
                f"transformers' {self.profile.facts.model_type} keeps no key/value cache, and this backend generates "
                "with one; run the tokens so far as a prompt, and choose the next one from its lm_head"
            )
        return empty_cache(self.model, self.profile.facts, rows=rows, windows=windows)

    @property
    def counts_from_cache(self) -> bool:
        """Whether positions that are not given may be counted from a layer that keeps no keys."""
        return any(not layer.softmax for layer in self.profile.facts.layers)

    @property
    def unequal_refusal(self) -> str:
        """Why prompts of unequal length do not generate in one batch; empty where they do."""
        if self._unequal is None:
            # The first time, two forwards of two tokens tell how the model numbers positions.
            self._unequal = generation_refusal(self.model, self.profile.facts, self.new_cache())
        return self._unequal

    def require_model(self) -> None:
        """Refuse work after the end.

        Raises:
            BackendUnavailable: the model was shut down.
        """
        if self.model is None:
            raise BackendUnavailable("this model was shut down while a generation was running; load it again")

    def step(self, program: Program, inputs: dict[str, Any], cache: Any, chunk: Chunk, collector: Collector) -> Tensor:
        """One incremental forward; float32 logits ``[batch, vocab]`` after each row's last token."""
        last = [length - 1 for length in chunk.lengths]
        kept = sorted(set(last))
        if self._keeps_logits and not program.at_head:
            # A number keeps the last columns, and a tensor those that it names.
            inputs["logits_to_keep"] = 1 if len(kept) == 1 else torch.tensor(kept, device=self.device)
            last = [kept.index(column) for column in last]
        inputs[cache_keyword(self.model)] = cache
        with _ordinary(grad=False), _told(), self._tapped(program, chunk, collector, stop=False):
            logits: Tensor = self.model(**inputs, use_cache=True).logits
            return logits[range(len(last)), last].float()

    def _forward(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        lengths = [len(r.token_ids) for r in requests]
        chunk = Chunk([0] * len(lengths), lengths, lengths)
        program, collector = self.compiled(requests), Collector()
        grad = not all(r.detach for r in requests)
        stop = not program.past_blocks and bool(self.layout.blocks)
        inputs = self.padded([request.token_ids for request in requests])
        if all(layer.causal for layer in self.profile.facts.layers):
            # No token sees padding behind it. With a mask, padding would see nothing inside a window, its rows would
            # be no numbers in float64, and then so would every row that gives them a weight of zero.
            inputs.pop("attention_mask", None)
        if self._keeps_logits and not program.at_head:
            inputs["logits_to_keep"] = 1
        with _ordinary(grad=grad), _told(), self._tapped(program, chunk, collector, stop=stop):
            self.model(**inputs, use_cache=False)
        with _ordinary(grad=grad):
            return [
                ForwardResult(rows={read.address: collector.rows(row, read.address) for read in request.reads})
                for row, request in enumerate(requests)
            ]

    @contextmanager
    def _tapped(self, program: Program, chunk: Chunk, collector: Collector, *, stop: bool) -> Iterator[None]:
        watched_layers = [
            Watched(
                module=self.layout.module("attn", layer),
                facts=self.profile.facts.layers[layer],
                jobs=program.attention.get(layer, []),
                writes=program.attention_writes.get(layer, []),
            )
            for layer in sorted({*program.attention, *program.attention_writes})
        ]
        taps = Taps(program, chunk, collector)
        # The inner of the two is the one that ends a stopped forward.
        with watched(watched_layers, chunk, collector), installed(taps, stop=stop):
            yield

    def compiled(self, requests: Sequence[ForwardRequest]) -> Program:
        """The work at the model's sites that requests, one per row of a batch, ask for.

        Raises:
            RequestError: the model, or a part of it, was compiled since it was loaded, or is in training mode.
        """
        refuse_compiled(self.model)
        if self.model.training:
            refuse_dropout(self.model)
        for request in requests:
            for address in (*(r.address for r in request.reads), *(w.address for w in request.writes)):
                self._add_path(address)
        return compile_program(requests, self.profile, self.layout, self._bind)

    def _add_path(self, address: Address) -> None:
        path = address.module_path
        if path is None or address.name in self.layout.trunk:
            return
        known = dict(self.model.named_modules())
        if path not in known:
            guess = unknown_name("module", path, known) if len(known) < 20 else f"unknown module {path!r}"
            raise AddressError(f"{address}: {guess}")
        self.layout.trunk[address.name] = known[path]

    def _bind(self, address: Address) -> Binding:
        return self.trunk.bind(address, self.profile.facts, self.layout)

    def padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Prompts as the model takes them, padded on the right, with a mask where there is padding."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        inputs: dict[str, Any] = {"input_ids": ids.to(self.device)}
        if any(len(row) < width for row in rows):
            lengths = torch.tensor([len(row) for row in rows])[:, None]
            inputs["attention_mask"] = (torch.arange(width)[None] < lengths).long().to(self.device)
        return inputs


def _moved(rows: Any, module: nn.Module) -> Tensor:
    """Rows where a module's weights are, in their dtype; as they are beside a module without any."""
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None:
        return rows
    # Weights that are kept off every device are fetched by the module itself, for the time of its forward.
    return rows.to(device=rows.device if weight.is_meta else weight.device, dtype=weight.dtype)


@contextmanager
def _ordinary(*, grad: bool) -> Iterator[None]:
    """Ordinary tensors, also where the caller is in inference mode, whose tensors nobody could change or save."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextmanager
def _told() -> Iterator[None]:
    """What fails inside transformers' forward, as one of our errors, with the cause kept.

    Raises:
        RequestError: such as for a dtype that the modelling code does not carry through, or no memory left.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, InterpError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(f"transformers' forward of this model failed: {reason}") from error
