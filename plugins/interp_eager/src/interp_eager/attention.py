"""Attention scores and probabilities of chosen layers, whatever kernel the model runs with; and other probabilities.

A torch function mode, which is local to the thread and to the block, watches what attention modules of the
wanted layers compute. A softmax gives both matrices as they are; a fused ``scaled_dot_product_attention``
gives its arguments, from which they are rebuilt beside it. Where they are only read, the forward is not changed.
Where they are written, a softmax's result is replaced, and a fused layer sums the values by the new ones itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interp_core.errors import InterpError, RequestError
from interp_core.facts import LayerFacts
from interp_core.operations import Replace
from interp_core.requests import Write
from interp_eager.collect import Chunk, Collector, token_columns
from interp_eager.program import ReadJob
from interp_eager.taps import operated

__all__ = ["Watched", "watched"]

_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})

Found = Callable[["Watched", Tensor, Tensor], Tensor | None]


@frozen(kw_only=True, eq=False)
class Watched:
    """One layer whose matrices are wanted.

    Attributes:
        module: its attention module.
        facts: its facts.
        jobs: what is read of it.
        writes: what is done to its probabilities, each with its batch row.
    """

    module: nn.Module
    facts: LayerFacts
    jobs: Sequence[ReadJob]
    writes: Sequence[tuple[int, Write]] = ()


@contextmanager
def watched(layers: Sequence[Watched], chunk: Chunk, collector: Collector) -> Iterator[None]:
    """Collect the matrices of ``layers`` during a forward inside the block.

    Args:
        layers: the layers.
        chunk: positions of this forward.
        collector: where rows go.

    Raises:
        InterpError: a layer computed neither a softmax nor a fused attention, or several that differ.
    """
    if not layers:
        yield
        return
    seen: dict[int, Tensor] = {}

    def found(layer: Watched, scores: Tensor, probs: Tensor) -> Tensor | None:
        changed = _changed(layer, probs, chunk)
        collect(layer, scores, probs if changed is None else changed)
        return changed

    def collect(layer: Watched, scores: Tensor, probs: Tensor) -> None:
        earlier = seen.setdefault(layer.facts.index, probs)
        if earlier is not probs:
            # Some apply one map to several parts of the values, each time by a call of its own.
            if not torch.equal(earlier, probs):
                raise InterpError(f"layer {layer.facts.index} computed several softmaxes, so it has no one matrix")
            return
        # Softmaxes are often computed in float32; what is handed out is the model's dtype, as everywhere.
        dtype = next((p.dtype for p in layer.module.parameters() if p.is_floating_point()), scores.dtype)
        scores, probs = scores.to(dtype), probs.to(dtype)
        scores, probs = (_unfolded(matrix, chunk) for matrix in (scores, probs))
        for job in layer.jobs:
            value = scores if job.address.name == "attn_scores" else probs
            head = job.address.coordinate("head")
            value = value if head is None else value[:, head]
            collector.add_pairs(job.address, value, job.wants, chunk, layer.facts.compress_rate)

    mode = _Watch(found)
    handles = []
    for layer in layers:
        handles.append(layer.module.register_forward_pre_hook(lambda m, a, layer=layer: mode.enter(layer)))
        handles.append(layer.module.register_forward_hook(lambda m, a, o: mode.leave(), always_call=True))
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()
    if missed := sorted({layer.facts.index for layer in layers} - set(seen)):
        raise InterpError(f"layers {missed} computed no softmax that could be seen: their attention is another kind")


class _Watch(TorchFunctionMode):
    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found
        self._layer: Watched | None = None
        self._before_sinks: Tensor | None = None
        self._sum: Tensor | None = None
        self._share: Tensor | None = None

    def enter(self, layer: Watched) -> None:
        self._layer = layer
        self._before_sinks = self._sum = self._share = None

    def leave(self) -> None:
        self._layer = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = self._layer
        if layer is None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            # Rebuilt outside of this mode, so that its own softmax is not taken for the model's.
            self._layer = None
            changed = self._found(layer, *_rebuilt(*args, **kwargs))
            out = func(*args, **kwargs) if changed is None else _mixed(changed, *args, **kwargs)
            self._layer = layer
            return out
        out = func(*args, **kwargs)
        if func is torch.cat and out.dim() == 4 and args[0][0].shape[-1] == out.shape[-1] - 1:
            # A column of sink logits beside the scores; what follows may shift them all before the softmax.
            self._before_sinks = args[0][0]
        if func is torch.logsumexp:
            self._sum = out
        elif func is Tensor.sigmoid and self._sum is not None and out.shape == self._sum.shape:
            # The sink comes as a factor on what a row sums up: its share beside the keys.
            self._share = out
        if func in _SOFTMAX and args[0].dim() in (3, 4) and _over_keys(args, kwargs):
            scores, before = args[0], self._before_sinks
            if before is not None and before.shape[:-1] == out.shape[:-1] and before.shape[-1] == out.shape[-1] - 1:
                scores, out_of_keys = before, out[..., :-1]
                changed = self._found(layer, _masked(scores, out_of_keys), out_of_keys)
                return out if changed is None else torch.cat([changed, out[..., -1:]], dim=-1)
            share = None if self._share is None else self._share.unsqueeze(-1).to(out.dtype)
            probs = out if share is None else out * share
            changed = self._found(layer, _masked(scores, out), probs)
            if changed is None or share is None:
                return out if changed is None else changed
            return out.where(changed == probs, changed / share)  # the model multiplies by the share behind this
        return out


def _changed(layer: Watched, probs: Tensor, chunk: Chunk) -> Tensor | None:
    """Probabilities after what is written there; ``None`` where nothing is, of these positions."""
    new: Tensor | None = None
    for row, write in layer.writes:
        queries = write.where.rows(chunk.starts[row], chunk.lengths[row], chunk.prompt_lengths[row])
        if queries == []:
            continue
        new = probs.clone() if new is None else new
        matrix = _unfolded(new, chunk)
        *_, columns = token_columns(matrix, row, chunk, layer.facts.compress_rate)
        head = write.address.coordinate("head")
        own = matrix[row, ..., columns]
        target = own.movedim(0, 1) if head is None else own[head]
        _check_keys(write, target[queries])
        target[queries] = operated(write.operation, target[queries])
    return new


def _check_keys(write: Write, rows: Tensor) -> None:
    operation = write.operation
    if isinstance(operation, Replace) and operation.value.shape[-1] != rows[0].numel():
        heads = 1 if rows.dim() == 2 else rows.shape[1]
        raise RequestError(
            f"Replace at {write.address}: a matrix with {operation.value.shape[-1] // heads} keys, where there are "
            f"{rows.shape[-1]}"
        )


def _unfolded(matrix: Tensor, chunk: Chunk) -> Tensor:
    """``[batch, heads, query, key]``, also where heads are folded into the batch."""
    return matrix.unflatten(0, (len(chunk.starts), -1)) if matrix.dim() == 3 else matrix


def _mixed(probs: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a fused attention would give with these probabilities."""
    if value.shape[1] != query.shape[1]:
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.matmul(probs.to(value.dtype), value)


def _rebuilt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    if key.shape[1] != query.shape[1]:
        # Query head h reads key head h // group: repeat each key head, do not tile them.
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = _masked(scores + attn_mask)
    probs = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    # A row that sees no key at all (padding) is NaN after a softmax; it has no probabilities.
    return scores, probs.nan_to_num(nan=0.0)


def _over_keys(args: Any, kwargs: Any) -> bool:
    """Whether a softmax runs over the last axis; compressors of keys have softmaxes over others."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return axis in (-1, args[0].dim() - 1)


def _masked(scores: Tensor, probs: Tensor | None = None) -> Tensor:
    """Masked entries, which families mark by a large negative number, as ``-inf``."""
    least = scores < torch.finfo(scores.dtype).min / 4
    if probs is not None:
        # The oldest add ten thousand in place of the least number that there is.
        least = least | ((scores <= -1e4) & (probs == 0))
    return scores.masked_fill(least, float("-inf"))
