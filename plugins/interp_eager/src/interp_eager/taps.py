"""What is done to the tensor of a site in one forward: writes, then reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from interp_core.arithmetic import apply_operation
from interp_core.errors import InterpError, RequestError
from interp_core.expressions import Place, Read, derives, read_value, write_value
from interp_core.operations import Apply
from interp_core.selection import select
from interp_eager.collect import Chunk, Collector
from interp_eager.graph import on_path
from interp_eager.program import Program, ReadJob, Site, SiteKey, WriteJob

__all__ = ["Taps", "operated"]


@define(eq=False)
class Taps:
    """The state of one forward with work at its sites."""

    program: Program
    chunk: Chunk
    collector: Collector
    _scratch: dict[SiteKey, Tensor] = field(factory=dict)
    _paths: set[SiteKey] = field(factory=set)

    def visit(self, site: Site, raw: Tensor) -> Tensor | None:
        """Do a site's work on its tensor; the tensor to put in its place, or ``None`` to leave it."""
        if site.leaf.role.startswith("path."):
            self._check_path(site, raw)
        tensor = rows = _as_rows(raw, site.leaf, len(self.chunk.starts))
        for write in site.direct:
            tensor = self._write(site, write, tensor)
        for read in site.reads:
            tensor = self._read(site, read, tensor)
        if site.kept:
            self._scratch[site.key] = tensor
        for write in site.carried:
            tensor = self._write(site, write, tensor)
        for read in site.sums:
            tensor = self._read(site, read, tensor)
        return None if tensor is rows else _as_raw(tensor, raw, site.leaf)

    def keeper(self, site: Site) -> Callable[[Tensor], None] | None:
        """What keeps a site's tensor for later, where nothing else is to be done here; ``None`` where it takes more."""
        job, batch = site.only_read, len(self.chunk.starts)
        if job is None or len(job.wants) != batch or not self.chunk.full(max(self.chunk.lengths)):
            return None
        add, later = self.collector.add_whole, self.collector.later

        def sort(whole: Tensor) -> None:
            rows = _as_rows(whole, site.leaf, batch)
            add(job.address, select(rows, job.axes, ()) if job.axes else rows, job.wants)

        def keep(raw: Tensor) -> None:
            if raw.requires_grad or raw.device.type != "cpu":
                self.visit(site, raw)
            else:
                later(sort, raw)

        return keep

    def _check_path(self, site: Site, raw: Tensor) -> None:
        """Refuse a module of which nobody knows what its tensor's axes are.

        Raises:
            RequestError: it runs twice in a forward, or its tensor does not begin with prompts and positions.
        """
        batch, columns = len(self.chunk.starts), max(self.chunk.lengths)
        shape = list(raw.shape)
        if site.key in self._paths:
            raise RequestError(f"{site.leaf.role} runs more than once in a forward, so it has no one output")
        self._paths.add(site.key)
        flat = len(shape) == 2 and shape[0] == batch * columns
        # Where two axes could be the positions, nothing says which of them it is.
        rows = len(shape) > 2 and shape[:2] == [batch, columns] and (len(shape) == 3 or shape[2] != columns)
        if not (flat or rows):
            raise RequestError(
                f"{site.leaf.role} gives {shape}, which does not begin with {batch} prompts and {columns} positions: "
                "what its axes are is not known, so its rows cannot be told apart; read a point, or a module around it"
            )

    def _leaf(self, site: Site, layer: int | None, tensor: Tensor) -> Callable[[Read], Tensor]:
        def value(leaf: Read) -> Tensor:
            key = self.program.key(leaf, layer)
            return tensor if key == site.key else self._scratch[key]

        return value

    def _read(self, site: Site, job: ReadJob, tensor: Tensor) -> Tensor:
        layer = job.address.layer
        leaf = self._leaf(site, layer, tensor)
        place = self._place(layer, tensor) if derives(job.expression) else None
        # Nearly all points are the tensor of their site, and a generation reads them in each step.
        value = tensor if isinstance(job.expression, Read) else read_value(job.expression, leaf, place)
        if place is None and value.requires_grad and job.in_graph:
            handed, tensor = on_path(job, leaf, value, tensor, self.chunk)
            self.collector.add_handed(job.address, handed, job.wants, self.chunk)
            return tensor
        if job.axes:
            value = select(value, job.axes, job.coordinates)
        self.collector.add(job.address, value, job.wants, self.chunk)
        return tensor

    def _place(self, layer: int | None, tensor: Tensor) -> Place:
        starts = torch.tensor(self.chunk.starts, device=tensor.device)
        positions = starts[:, None] + torch.arange(tensor.shape[1], device=tensor.device)
        layout = self.program.layout
        return Place(layer, positions, lambda role: layout.module(role, None if role in layout.trunk else layer))

    def _write(self, site: Site, job: WriteJob, tensor: Tensor) -> Tensor:
        leaf = self._leaf(site, job.items[0][1].address.layer, tensor)
        old = read_value(job.expression, leaf)
        new = old.clone()
        changed = False
        for row, write, coordinates in job.items:
            where = write.where.rows(self.chunk.starts[row], self.chunk.lengths[row], self.chunk.prompt_lengths[row])
            if where == []:
                continue
            changed = True
            target = select(new[row], job.axes, coordinates) if job.axes else new[row]
            target[where] = operated(write.operation, target[where])
        if not changed:
            return tensor
        result: Tensor = write_value(job.expression, leaf, old, new)
        return result


def operated(operation: Any, rows: Tensor) -> Tensor:
    """Rows ``[rows, *axes]`` after an operation, in their own dtype.

    Raises:
        RequestError: it failed, or gave something of another shape.
    """
    # Operations work on flat rows; a callable sees the rows as the point's axes have them.
    given = rows.clone() if isinstance(operation, Apply) else rows.reshape(rows.shape[0], -1)
    try:
        out = apply_operation(operation, given)
    except InterpError:
        raise
    except Exception as error:
        raise RequestError(f"{type(operation).__name__} at {operation.address} failed: {error}") from error
    if not isinstance(out, Tensor) or out.shape != given.shape or out.is_complex():
        kind = f"{out.dtype} of shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise RequestError(
            f"{type(operation).__name__} at {operation.address} gave {kind} for rows of shape {list(given.shape)}"
        )
    return out.to(rows.dtype).reshape(rows.shape)


def _as_rows(raw: Tensor, leaf: Read, batch: int) -> Tensor:
    """Any of the shapes that modules use as ``[batch, columns, width]``."""
    if leaf.heads_first:
        raw = raw.transpose(1, 2)
    if leaf.streams_first:
        raw = raw.movedim(0, 2)
    if leaf.merged:
        raw = raw.flatten(1)
    if raw.dim() == 4:
        return raw.flatten(2)
    if raw.dim() == 2:
        return raw.unflatten(0, (batch, -1))
    return raw


def _as_raw(rows: Tensor, raw: Tensor, leaf: Read) -> Tensor:
    if leaf.heads_first:
        return rows.reshape(raw.transpose(1, 2).shape).transpose(1, 2)
    if leaf.streams_first:
        return rows.reshape(raw.movedim(0, 2).shape).movedim(2, 0)
    return rows.reshape(raw.shape)
