"""From rows per request to a cache in the caller's layout; and from a cache to one with some of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import evolve

from interp_core.address import Address
from interp_core.cache import Cache
from interp_core.cache_rows import MASKED, held_positions, is_pairwise, own_rows
from interp_core.errors import RequestError
from interp_core.requests import ForwardResult
from interp_core.tokens import TokenBatch, select_positions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["assemble", "with_positions"]


def assemble(
    batch: TokenBatch,
    tokens: Sequence[Sequence[int]],
    results: Sequence[ForwardResult],
    positions: Sequence[tuple[int, ...] | None],
    pairwise: Mapping[Address, float],
    addresses: Sequence[Address],
    model_id: str | None = None,
) -> Cache:
    """Put each request's rows into the caller's layout.

    Args:
        batch: the caller's prompts and layout.
        tokens: tokens that went through the forward, per request.
        results: per request.
        positions: absolute positions that were asked for, per request; ``None`` for all.
        pairwise: addresses with a query and a key axis, each with the value of a masked entry.
        addresses: what to assemble, in order.
        model_id: whose rows they are.
    """
    chosen = any(p is not None for p in positions)
    lengths = tuple(len(t) if p is None else len(p) for t, p in zip(tokens, positions, strict=True))
    offsets = (0,) * len(lengths) if chosen else batch.offsets
    width = max((o + n for o, n in zip(offsets, lengths, strict=True)), default=0)
    width = width if chosen else max(width, batch.width)
    key_width = max((o + len(t) for o, t in zip(offsets, tokens, strict=True)), default=0)
    key_width = key_width if chosen else max(key_width, batch.width)
    tensors: dict[Address, Tensor] = {}
    entries: dict[Address, tuple[int, ...]] = {}
    with _ordinary():
        for address in addresses:
            rows = [result.rows[address] for result in results]
            if address in pairwise:
                # One column per token; what stands behind them are compressed entries.
                extra = tuple(row.shape[-1] - len(t) for row, t in zip(rows, tokens, strict=True))
                if any(extra):
                    entries[address] = extra
                tensors[address] = _place_pairs(rows, offsets, width, key_width, extra, pairwise[address])
            else:
                tensors[address] = _place(rows, offsets, width)
    where = tuple(p or () for p in positions) if chosen else None
    return Cache(tensors, tuple(tuple(t) for t in tokens), lengths, offsets, where, entries, model_id)


@contextmanager
def _ordinary() -> Iterator[None]:
    """Ordinary tensors, also where the caller is in inference mode, whose tensors nobody could change or save."""
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def with_positions(cache: Cache, positions: Any) -> Cache:
    """The cache that a capture of ``positions`` alone gives; see :meth:`Cache.at`."""
    wanted = [_wanted(cache, positions, i) for i in range(len(cache.lengths))]
    results = []
    for i, chosen in enumerate(wanted):
        place = {position: row for row, position in enumerate(held_positions(cache, i))}
        index = [place[position] for position in chosen]
        own = {address: own_rows(cache, address, i) for address in cache}
        rows = {a: t[..., index, :] if is_pairwise(a) else t[index] for a, t in own.items()}
        results.append(ForwardResult(rows=rows))
    # Of a cache that knows no tokens, as many of them as it has rows.
    tokens = cache.tokens or tuple((0,) * n for n in cache.lengths)
    batch = TokenBatch(rows=tokens, offsets=[0] * len(tokens), width=0, single=False)
    pairwise = {a: MASKED.get(a.name, 0.0) for a in cache if is_pairwise(a)}
    found = assemble(batch, tokens, results, wanted, pairwise, list(cache), cache.model_id)
    return evolve(found, tokens=cache.tokens)


def _wanted(cache: Cache, positions: Any, prompt: int) -> tuple[int, ...]:
    held = held_positions(cache, prompt)
    length = len(cache.tokens[prompt]) if cache.tokens else cache.lengths[prompt]
    wanted = select_positions(positions, length) or ()
    missing = sorted(set(wanted) - set(held))
    if missing:
        raise RequestError(f"prompt {prompt}: positions {missing} are not in this cache, which holds {list(held)}")
    return wanted


def _place(rows: list[Tensor], offsets: Sequence[int], width: int) -> Tensor:
    whole = None if any(offsets) else _common_base(rows, width)
    if whole is not None:
        return whole
    out = rows[0].new_zeros((len(rows), width, *rows[0].shape[1:]))
    for i, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        out[i, offset : offset + row.shape[0]] = row
    return out


def _common_base(rows: list[Tensor], width: int) -> Tensor | None:
    """The tensor whose consecutive slices ``rows`` are, so that a whole batch need not be copied again.

    In the autograd graph there is more to it: a copy would be no point of the graph.
    """
    base = rows[0]._base
    if base is None or tuple(base.shape[:2]) != (len(rows), width):
        return None
    for i, row in enumerate(rows):
        if row._base is not base or row.shape[1:] != base.shape[2:] or row.data_ptr() != base[i].data_ptr():
            return None
        if bool(base[i, row.shape[0] :].any()):
            return None
    return base


def _place_pairs(
    rows: list[Tensor], offsets: Sequence[int], width: int, key_width: int, entries: Sequence[int], masked: float
) -> Tensor:
    """Attention matrices: a real query's padded keys are masked; padded queries are zero rows."""
    lead = rows[0].shape[:-2]
    out = rows[0].new_zeros((len(rows), *lead, width, key_width + max(entries)))
    for i, (row, offset, extra) in enumerate(zip(rows, offsets, entries, strict=True)):
        queries, keys = row.shape[-2], row.shape[-1] - extra
        block = out[i, ..., offset : offset + queries, :]
        block.fill_(masked)
        block[..., offset : offset + keys] = row[..., :keys]
        block[..., key_width : key_width + extra] = row[..., keys:]
    return out
