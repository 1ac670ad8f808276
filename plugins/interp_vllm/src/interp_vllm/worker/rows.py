"""Which rows of a step belong to which request, and rows gathered over steps by absolute position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from interp_core.errors import InterpError

__all__ = ["PositionedRows", "Span"]


@frozen
class Span:
    """Rows ``start .. stop - 1`` of a step hold positions ``position ..`` of one request.

    Attributes:
        request: vLLM's internal id.
        start: first row.
        stop: one past the last row.
        position: absolute position of the first row.
    """

    request: str
    start: int
    stop: int
    position: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@define(eq=False)
class PositionedRows:
    """Rows of one address of one request, whatever the chunks in which they came.

    A preempted request starts again from position 0: a position that comes twice counts once, the last time.

    Attributes:
        wanted: positions to keep, in the order wanted; ``None`` for all.
    """

    wanted: tuple[int, ...] | None = None
    _chunks: list[tuple[Sequence[int], Tensor]] = field(factory=list)

    def chosen(self, position: int, length: int) -> list[int] | slice:
        """Rows to keep of a chunk that holds positions ``position .. position + length - 1``."""
        if self.wanted is None:
            return slice(None)
        return [p - position for p in self.wanted if position <= p < position + length]

    def add(self, position: int, length: int, rows: Tensor) -> None:
        """Keep the :meth:`chosen` rows of a chunk, a copy of the caller's making."""
        chosen = self.chosen(position, length)
        where = range(position, position + length) if isinstance(chosen, slice) else [position + i for i in chosen]
        self._chunks.append((where, rows))

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(rows.nbytes for _, rows in self._chunks)

    def assembled(self, count: int, what: str) -> Tensor:
        """Rows of positions ``0 .. count - 1``, or those wanted of them, in order.

        Raises:
            InterpError: a row never came. A hole is never handed out as numbers.
        """
        order = range(count) if self.wanted is None else self.wanted
        if len(self._chunks) == 1 and list(self._chunks[0][0]) == list(order):
            return self._chunks[0][1]
        place = {position: i for i, position in enumerate(order)}
        seen = [False] * len(place)
        out: Tensor | None = None
        for where, rows in self._chunks:
            kept = [(place[p], i) for i, p in enumerate(where) if p in place]
            if not kept:
                continue
            if out is None:
                out = rows.new_empty((len(place), *rows.shape[1:]))
            targets, sources = zip(*kept, strict=True)
            out[list(targets)] = rows if len(kept) == len(rows) else rows[list(sources)]
            for target in targets:
                seen[target] = True
        missing = [p for p, i in place.items() if not seen[i]]
        if out is None or missing:
            raise InterpError(f"{what}: rows of positions {missing[:5]} never came out of the forward")
        return out[[place[p] for p in order]] if len(place) < len(order) else out


def kept_copy(rows: Tensor, chosen: list[int] | slice) -> Tensor:
    """A copy of the chosen rows that no later kernel can change."""
    if isinstance(chosen, slice):
        return rows[chosen].clone(memory_format=torch.contiguous_format)
    picked: Any = rows[chosen]
    return picked.contiguous() if picked.data_ptr() != rows.data_ptr() else picked.clone()
