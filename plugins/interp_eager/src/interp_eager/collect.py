"""Rows that were read, per request and address, until they are handed back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from interp_core.address import Address
from interp_core.converters import as_tuple

__all__ = ["Chunk", "Collector", "Want", "token_columns"]


@frozen
class Chunk:
    """Which absolute positions the rows of one forward hold.

    Attributes:
        starts: absolute position of each batch row's first column.
        lengths: number of real columns of each batch row; padding stands behind them.
        prompt_lengths: length of each request's prompt.
    """

    starts: tuple[int, ...] = field(converter=as_tuple)
    lengths: tuple[int, ...] = field(converter=as_tuple)
    prompt_lengths: tuple[int, ...] = field(converter=as_tuple)

    def full(self, columns: int) -> bool:
        """Whether no batch row has padding."""
        return all(n == columns for n in self.lengths)


@frozen(eq=False)
class Want:
    """What one request wants of a tensor: which batch row, which positions (``None``: all), and how to keep it."""

    row: int
    positions: tuple[int, ...] | None
    detach: bool = True
    keep_on_device: bool = False


@frozen(eq=False)
class Block:
    """Rows of an attention matrix from one forward.

    Attributes:
        first_key: absolute position of the first token column.
        tokens: ``[*heads, query, key]``, one column per token.
        entries: ``[*heads, query, entry]``, one column per compressed entry, from the first one on.
    """

    first_key: int
    tokens: Tensor
    entries: Tensor


@define(eq=False)
class Collector:
    """Gathers rows over one or several forwards."""

    _rows: dict[tuple[int, Address], list[Tensor]] = field(factory=dict)
    _blocks: dict[tuple[int, Address], list[Block]] = field(factory=dict)
    _waiting: list[tuple[Callable[[Tensor], None], Tensor]] = field(factory=list)

    def later(self, sort: Callable[[Tensor], None], whole: Tensor) -> None:
        """Keep a copy of ``whole``, and give it to ``sort`` once somebody asks for rows.

        Inside a forward the weights push all else out of the processor's caches, so there the least is done.
        """
        copy = whole.clone(memory_format=torch.contiguous_format)
        self._waiting.append((sort, copy))

    def add_whole(self, address: Address, whole: Tensor, wants: Sequence[Want]) -> None:
        """Keep ``whole`` (``[batch, columns, *axes]``), which is nobody else's."""
        for want in wants:
            self._rows.setdefault((want.row, address), []).append(whole[want.row])

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sort, whole in waiting:
            sort(whole)

    def add(self, address: Address, value: Tensor, wants: Sequence[Want], chunk: Chunk) -> None:
        """Keep rows of ``value`` (``[batch, columns, *axes]``)."""
        self._settle()
        whole = self._whole(value, wants, chunk)
        for want in wants:
            row = whole[want.row] if whole is not None else self._some(value, want, chunk)
            self._rows.setdefault((want.row, address), []).append(row)

    def add_handed(self, address: Address, handed: Tensor, wants: Sequence[Want], chunk: Chunk) -> None:
        """Keep ``handed`` (``[wants, rows, *axes]``) as the slices of one tensor, which is a point of the graph."""
        for number, want in enumerate(wants):
            count = chunk.lengths[want.row] if want.positions is None else len(want.positions)
            self._rows.setdefault((want.row, address), []).append(handed[number, :count])

    def add_pairs(
        self, address: Address, value: Tensor, wants: Sequence[Want], chunk: Chunk, compress_rate: int | None = None
    ) -> None:
        """Keep rows of an attention matrix ``value`` (``[batch, *heads, query, key]``).

        With ``compress_rate``, columns of compressed entries stand behind those of tokens, one per so many tokens.
        """
        for want in wants:
            length = chunk.lengths[want.row]
            keys, own, first_key, columns = token_columns(value, want.row, chunk, compress_rate)
            rows = value[want.row, ..., :length, :]
            if want.positions is not None:
                rows = rows[..., list(want.positions), :]
            tokens = rows[..., columns]
            block = Block(first_key, _kept(tokens, want), _kept(rows[..., keys : keys + own], want))
            self._blocks.setdefault((want.row, address), []).append(block)

    def rows(self, row: int, address: Address, masked: float | None = None, *, forwards: int | None = None) -> Tensor:
        """All rows of a request in token order; for attention matrices ``masked`` fills what was never computed.

        ``forwards`` is how many of them count, from the first; ``None`` for all.
        """
        self._settle()
        if (row, address) in self._rows:
            parts = self._rows[row, address][:forwards]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return _joined(self._blocks[row, address][:forwards], 0.0 if masked is None else masked)

    def has(self, row: int, address: Address) -> bool:
        """Whether anything was read for a request and address."""
        self._settle()
        return (row, address) in self._rows or (row, address) in self._blocks

    def _whole(self, value: Tensor, wants: Sequence[Want], chunk: Chunk) -> Tensor | None:
        """One copy of the whole batch where all want the same of it: much cheaper than one per request."""
        first = wants[0]
        same = len(wants) == 1 or all(w.positions == first.positions and w.detach == first.detach for w in wants)
        if not same or len(wants) != value.shape[0] or not chunk.full(value.shape[1]):
            return None
        chosen = value if first.positions is None else value[:, list(first.positions)]
        return _kept(chosen, first, fresh=first.positions is not None)

    @staticmethod
    def _some(value: Tensor, want: Want, chunk: Chunk) -> Tensor:
        rows = value[want.row, : chunk.lengths[want.row]]
        if want.positions is not None:
            return _kept(rows[list(want.positions)], want, fresh=True)
        return _kept(rows, want)


def token_columns(
    matrix: Tensor, row: int, chunk: Chunk, compress_rate: int | None = None
) -> tuple[int, int, int, slice]:
    """Which columns of an attention matrix ``[..., query, key]`` are tokens of a batch row's own request.

    Returns:
        How many columns stand before those of compressed entries, how many entries are the row's own, the absolute
        position of the first token column, and the token columns.
    """
    start, length = chunk.starts[row], chunk.lengths[row]
    queries, columns = matrix.shape[-2:]
    made = 0 if compress_rate is None else (start + queries) // compress_rate
    own = 0 if compress_rate is None else (start + length) // compress_rate
    keys = columns - made
    # Keys end where this chunk ends. A sliding cache holds only the last of them; what stands in front of a shorter
    # prompt's first token, in a batch, is padding.
    first_key = max(0, start + queries - keys)
    padding = max(0, keys - start - queries)
    return keys, own, first_key, slice(padding, min(keys, padding + start + length - first_key))


def _kept(value: Tensor, want: Want, *, fresh: bool = False) -> Tensor:
    """A copy that nothing of the model can change; the tensor itself where its place in the graph is wanted."""
    if not want.detach:
        return value
    if value.requires_grad:
        value = value.detach()
    if not want.keep_on_device and value.device.type != "cpu":
        return value.to("cpu")
    return value if fresh else value.clone(memory_format=torch.contiguous_format)


def _joined(blocks: list[Block], masked: float) -> Tensor:
    """``[*heads, query, key]``: a column per token, then one per compressed entry."""
    head = blocks[0]
    if len(blocks) == 1:
        return torch.cat([head.tokens, head.entries], dim=-1) if head.entries.shape[-1] else head.tokens
    total_queries = sum(block.tokens.shape[-2] for block in blocks)
    total_keys = max(block.first_key + block.tokens.shape[-1] for block in blocks)
    total_entries = max(block.entries.shape[-1] for block in blocks)
    shape = (*head.tokens.shape[:-2], total_queries, total_keys + total_entries)
    out = head.tokens.new_full(shape, masked)
    at = 0
    for block in blocks:
        queries, keys = block.tokens.shape[-2:]
        out[..., at : at + queries, block.first_key : block.first_key + keys] = block.tokens
        out[..., at : at + queries, total_keys : total_keys + block.entries.shape[-1]] = block.entries
        at += queries
    return out
