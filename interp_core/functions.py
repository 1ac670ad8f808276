"""The public functions on a model: check everything, build requests, run them, arrange what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from interp_core.address import Address
from interp_core.assembly import assemble
from interp_core.cache import Cache
from interp_core.cache_rows import MASKED
from interp_core.completing import complete, stream
from interp_core.errors import RequestError
from interp_core.requests import ForwardRequest, ForwardResult, Read, Sampling
from interp_core.results import AttentionRecord, GenStep
from interp_core.sampling import read_count, read_sampling, read_stop
from interp_core.scalars import whole_number
from interp_core.steering import Steering, active_steering, as_steering, writes_for
from interp_core.streams import read_reduction, reduced
from interp_core.tokens import TokenBatch, read_layers, read_tokens, select_positions

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = [
    "capture_attention",
    "capture_generation",
    "decode_residuals",
    "generate",
    "generate_stream",
    "readable_addresses",
    "run_with_cache",
]


def run_with_cache(
    model: InterpModel,
    tokens: Any,
    points: Sequence[Any],
    *,
    attention_mask: Any = None,
    positions: Any = None,
    steering: Any = None,
    detach: bool = True,
    keep_on_device: bool = False,
) -> Cache:
    """Run prompts once and read ``points``.

    Args:
        model: the model.
        tokens: ``[batch, seq]`` or ``[seq]`` tensor of ids, a list of ids, or a list of unequal lists.
        points: addresses; ranges expand; an empty list reads nothing.
        attention_mask: 1 at real tokens of a padded ``[batch, seq]``, on either side.
        positions: absolute positions, a slice, or ``"last"``, of each prompt's own tokens.
        steering: operations for this call, after those of surrounding ``steer`` blocks.
        detach: cut results from the autograd graph. If not, every row of a position that can be written is a point of
            the graph: differentiating by it asks what a write there would change, coordinates, positions and unequal
            prompts included. (Prompts that are padded on the left, or that run as several forwards, are put together
            afterwards: gradients flow back from those results, and not to them; nor to attention matrices.)
        keep_on_device: leave results on the model's device.

    Returns:
        ``cache["resid_post.3"]`` is ``[batch, pos, *axes]``, a copy, in the model's dtype; what a router computes
        is in the dtype that it computes in, and indices are int64.

    Raises:
        AddressError: a point does not exist on this model.
        CapabilityUnsupported: a point or an operation is not served.
        RequestError: tokens, mask, positions or operations are not valid.
    """
    addresses = readable_addresses(model, points)
    batch = read_tokens(tokens, model.facts, attention_mask)
    if not detach:
        _require_gradients(model)
    steerings = _steerings(model, steering)
    chosen = [select_positions(positions, n) for n in batch.lengths]
    requests = [
        ForwardRequest(
            token_ids=row,
            reads=tuple(Read(address=a, positions=where) for a in addresses),
            writes=writes_for(steerings, len(row)),
            detach=detach,
            keep_on_device=keep_on_device,
        )
        for row, where in zip(batch.rows, chosen, strict=True)
    ]
    results = model.session.run(requests) if addresses else [ForwardResult() for _ in requests]
    pairwise = _pairwise(model, addresses)
    return assemble(batch, batch.rows, results, chosen, pairwise, addresses, model.model_id)


def capture_generation(
    model: InterpModel,
    tokens: Any,
    points: Sequence[Any],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    steering: Any = None,
    attention_mask: Any = None,
    stop: str | Sequence[str] | None = None,
    n_logprobs: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    ignore_eos: bool = False,
    keep_on_device: bool = False,
) -> tuple[Any, Cache]:
    """Generate, and read ``points`` from the same incremental forwards.

    Returns:
        ``(Completion, Cache)``, a list of completions for a batch. A prompt of ``n`` tokens with ``m``
        new ones has ``n + m - 1`` rows: the last new token never went through the forward.

    Raises:
        AddressError, CapabilityUnsupported, RequestError: as :func:`run_with_cache`.
    """
    addresses = readable_addresses(model, points)
    sampling = read_sampling(max_tokens, temperature, seed, top_k, top_p, min_p, repetition_penalty, ignore_eos)
    batch = read_tokens(tokens, model.facts, attention_mask, room=sampling.max_tokens)
    reads = tuple(Read(address=a) for a in addresses)
    stops, logprobs = read_stop(stop), _count(n_logprobs, model)
    requests = _generating(model, batch, sampling, reads, steering, logprobs, False, keep_on_device)
    found = complete(model, requests, stops)
    completions, results = [completion for completion, _ in found], [result for _, result in found]
    # The last new token never went through the forward.
    rows = [(*c.prompt_token_ids, *c.token_ids)[:-1] for c in completions]
    layout = TokenBatch(rows=rows, offsets=(0,) * len(rows), width=max(map(len, rows)), single=batch.single)
    pairwise = _pairwise(model, addresses)
    cache = assemble(layout, rows, results, [None] * len(rows), pairwise, addresses, model.model_id)
    return (completions[0] if batch.single else completions), cache


def generate(
    model: InterpModel,
    tokens: Any,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    n_logprobs: int = 0,
    steering: Any = None,
    attention_mask: Any = None,
    n: int = 1,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    ignore_eos: bool = False,
) -> Any:
    """Generate new tokens; greedy unless ``temperature`` is above 0.

    Args:
        model: the model.
        tokens: as :func:`run_with_cache`.
        max_tokens: most new tokens, at least 1.
        temperature: 0 for the most likely token each time.
        seed: seed of this call's sampling.
        stop: text that ends the completion, which ends before it.
        n_logprobs: top log-probabilities per new token.
        steering: operations for this call.
        attention_mask: as :func:`run_with_cache`.
        n: completions per prompt; the seed of each is the one before plus 1.
        top_k, top_p, min_p: restrict sampling to likely tokens.
        repetition_penalty: divides positive logits of tokens that prompt or completion hold, and multiplies negative
            ones, before anything is chosen; log-probabilities stay the model's own.
        ignore_eos: go on after an end-of-text token.

    Returns:
        A :class:`Completion`; a list of them for a batch. With ``n`` above 1, a list of ``n`` in place of each.

    Raises:
        CapabilityUnsupported, RequestError: as :func:`run_with_cache`.
    """
    sampling = read_sampling(max_tokens, temperature, seed, top_k, top_p, min_p, repetition_penalty, ignore_eos)
    batch = read_tokens(tokens, model.facts, attention_mask, room=sampling.max_tokens)
    stops, logprobs = read_stop(stop), _count(n_logprobs, model)
    n = read_count("n", n)
    requests = [
        several
        for request in _generating(model, batch, sampling, (), steering, logprobs, False, False)
        for several in _samples(request, n)
    ]
    completions = [completion for completion, _ in complete(model, requests, stops)]
    if n > 1:
        grouped = [completions[i : i + n] for i in range(0, len(completions), n)]
        return grouped[0] if batch.single else grouped
    return completions[0] if batch.single else completions


def generate_stream(
    model: InterpModel,
    tokens: Any,
    *,
    max_tokens: int,
    n_logprobs: int = 0,
    temperature: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    steering: Any = None,
    attention_mask: Any = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    ignore_eos: bool = False,
) -> Iterator[GenStep]:
    """Generate step by step. Everything is checked, and steering is fixed, when this is called.

    Returns:
        An iterator of :class:`GenStep` for one prompt. Leaving it early ends the generation.

    Raises:
        CapabilityUnsupported, RequestError: as :func:`run_with_cache`.
    """
    sampling = read_sampling(max_tokens, temperature, seed, top_k, top_p, min_p, repetition_penalty, ignore_eos)
    batch = read_tokens(tokens, model.facts, attention_mask, room=sampling.max_tokens)
    if not batch.single:
        raise RequestError("generate_stream takes one prompt; use generate for a batch, or one stream per prompt")
    stops, logprobs = read_stop(stop), _count(n_logprobs, model)
    want_logits = model.profile.refusal("step_logits") is None
    (request,) = _generating(model, batch, sampling, (), steering, logprobs, want_logits, False)
    return stream(model, request, stops)


def capture_attention(
    model: InterpModel, tokens: Any, layers: Sequence[int], *, steering: Any = None
) -> dict[int, AttentionRecord]:
    """Attention of one prompt at ``layers``.

    Returns:
        Per layer an :class:`AttentionRecord`: scores and probabilities ``[heads, query, key]``, values
        ``[kv_heads, pos, v_head_dim]``.

    Raises:
        AddressError: a layer does not exist.
        CapabilityUnsupported: a layer has no softmax attention, or the backend keeps no matrices.
        RequestError: ``tokens`` is more than one prompt, or not valid.
    """
    model.profile.require("attention")
    wanted = read_layers(layers, model.n_layers)
    if not read_tokens(tokens, model.facts).single:
        raise RequestError("capture_attention takes one prompt")
    names = ("attn_scores", "attn_probs", "value")
    cache = run_with_cache(model, tokens, [(name, i) for i in wanted for name in names], steering=steering)
    found = {}
    for i in wanted:
        scores, probs, value = (cache[(name, i)][0] for name in names)
        entries = cache.entries.get(Address("attn_scores", i), (0,))[0]
        found[i] = AttentionRecord(scores=scores, probs=probs, value=value.transpose(0, 1), entries=entries)
    return found


def decode_residuals(model: InterpModel, rows: Any, *, reduction: Any = None) -> Tensor:
    """Raw logits ``[rows, vocab]`` of residual rows: final norm and unembedding, no softcap or multiplier.

    On a trunk of several streams rows are ``[rows, streams, d_model]``, and a ``reduction`` is named (see
    ``logit_lens``).

    ``model.decode_residuals(rows)`` applies those too, and works on every backend.

    Raises:
        CapabilityUnsupported: the backend only exposes its complete unembedding.
        RequestError: ``rows`` is not ``[rows, d_model]``.
    """
    model.profile.require("raw_logits")
    return unembed_rows(model, rows, raw=True, reduction=reduction)


def unembed_rows(model: InterpModel, rows: Any, *, raw: bool, reduction: Any = None) -> Tensor:
    """Logits of residual rows ``[rows, *shape]``, or of one row, which gives ``[vocab]``.

    ``shape`` is ``[d_model]``, or with a reduction ``[streams, d_model]``.
    """
    import torch

    how = read_reduction(reduction, model.profile)
    shape = (model.d_model,) if how is None else (model.facts.n_streams, model.d_model)
    wanted = f"rows are [rows, {', '.join(map(str, shape))}] of real numbers"
    try:
        tensor = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{wanted}: {error}") from error
    single = tensor.dim() == len(shape)
    if (
        tensor.dim() - (not single) != len(shape)
        or tensor.shape[-len(shape) :] != shape
        or not tensor.is_floating_point()
    ):
        raise RequestError(f"{wanted}, not {tensor.dtype} {list(tensor.shape)}")
    tensor = tensor.reshape(-1, *shape)
    logits = model.session.unembed(tensor if how is None else reduced(tensor, how), raw=raw)
    return logits[0] if single else logits


def readable_addresses(model: InterpModel, points: Any) -> tuple[Address, ...]:
    """Addresses of a request to read, each of them served.

    Raises:
        AddressError: one does not exist.
        CapabilityUnsupported: one is not served.
    """
    addresses = model.profile.addresses(points)
    for address in addresses:
        refused = model.profile.read_refusal(address)
        if refused is not None:
            raise refused
    if not addresses:
        model.profile.require("capture")
    return addresses


def _pairwise(model: InterpModel, addresses: Sequence[Address]) -> dict[Address, float]:
    specs = model.profile.specs
    return {a: MASKED.get(a.name, 0.0) for a in addresses if a.name in specs and not specs[a.name].positional}


def _steerings(model: InterpModel, steering: Any) -> tuple[Steering, ...]:
    active = active_steering(model)
    if steering is None:
        return active
    return (*active, as_steering(model.profile, steering))


def _require_gradients(model: InterpModel) -> None:
    import torch

    model.profile.require("gradients")
    if torch.is_inference_mode_enabled():
        raise RequestError("detach=False inside torch.inference_mode(): there is no graph to stay in")


def _samples(request: ForwardRequest, n: int) -> list[ForwardRequest]:
    sampling = request.sampling
    if n == 1 or sampling is None or sampling.seed is None:
        return [request] * n
    seed = sampling.seed
    return [evolve(request, sampling=evolve(sampling, seed=(seed + i) % 2**63)) for i in range(n)]


def _count(n_logprobs: Any, model: InterpModel) -> int:
    number = whole_number(n_logprobs)
    if number is None or not 0 <= number <= model.vocab_size:
        raise RequestError(f"n_logprobs is a number from 0 to {model.vocab_size}, not {n_logprobs!r}")
    return number


def _generating(
    model: InterpModel,
    batch: TokenBatch,
    sampling: Sampling,
    reads: tuple[Read, ...],
    steering: Any,
    n_logprobs: int,
    want_logits: bool,
    keep_on_device: bool,
) -> list[ForwardRequest]:
    steerings = _steerings(model, steering)
    return [
        ForwardRequest(
            token_ids=row,
            reads=reads,
            writes=writes_for(steerings, len(row)),
            sampling=sampling,
            n_logprobs=n_logprobs,
            want_logits=want_logits,
            keep_on_device=keep_on_device,
        )
        for row in batch.rows
    ]
