"""Captures that stay in the autograd graph, as points of it: what is handed out is what the forward goes on with.

A result is usually a view or a copy of what the model computes, so nothing of the forward depends on it and one cannot
differentiate by it. Here the part that is read is copied, and the model's own tensor becomes itself plus the difference
of the two: exactly the same numbers, through the copy. Differentiating by a result then asks what a write there asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interp_core.expressions import Expression, Read, spread
from interp_core.selection import select
from interp_eager.collect import Chunk, Want
from interp_eager.program import ReadJob

__all__ = ["on_path"]


def on_path(
    job: ReadJob, leaf: Callable[[Read], Tensor], value: Tensor, tensor: Tensor, chunk: Chunk
) -> tuple[Tensor, Tensor]:
    """What is handed out for ``job``, and the tensor of its site with that in its path.

    Args:
        job: what is read.
        leaf: tensors of the expression's leaves.
        value: ``[batch, columns, width]``, the expression's value.
        tensor: the site's tensor.
        chunk: positions of this forward.

    Returns:
        ``[wants, rows, *axes]``, with zero rows behind a request's own; and the site's tensor, of the same values.
    """
    part = select(value, job.axes, job.coordinates) if job.axes else value
    rows, columns, real = _places(job.wants, chunk)
    taken = part[rows, columns]
    mask = real.reshape(*real.shape, *(1,) * (taken.dim() - 2)).to(taken.device)
    nothing = taken.new_zeros(())
    handed = taken.where(mask, nothing).clone()
    change = torch.zeros_like(value)
    target = select(change, job.axes, job.coordinates) if job.axes else change
    target.index_put_((rows, columns), (handed - taken).where(mask, nothing), accumulate=True)
    return handed, tensor + _back(job.expression, leaf, change)


def _back(expression: Expression, leaf: Callable[[Read], Tensor], change: Tensor) -> Tensor:
    added: Tensor = spread(expression, leaf, change)
    return added


def _places(wants: Sequence[Want], chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Batch rows ``[wants, 1]``, columns ``[wants, most]`` and which of these are wanted, of the rest any will do."""
    listed = [range(chunk.lengths[w.row]) if w.positions is None else w.positions for w in wants]
    most = max(map(len, listed))
    columns = torch.zeros(len(listed), most, dtype=torch.long)
    real = torch.zeros(len(listed), most, dtype=torch.bool)
    for number, places in enumerate(listed):
        columns[number, : len(places)] = torch.tensor(list(places), dtype=torch.long)
        real[number, : len(places)] = True
    return torch.tensor([[w.row] for w in wants]), columns, real
