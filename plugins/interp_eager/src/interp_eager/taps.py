"""Hooks on modules for the time of one forward: install, work, remove, also after an exception."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from interp_core.arithmetic import apply_operation
from interp_core.errors import InterpError, RequestError
from interp_core.expressions import Place, Read, derives, read_value, write_value
from interp_core.operations import Apply
from interp_core.selection import select
from interp_eager.collect import Chunk, Collector
from interp_eager.graph import on_path
from interp_eager.program import Program, ReadJob, Site, SiteKey, WriteJob

__all__ = ["StopForward", "Taps", "installed", "operated"]


class StopForward(Exception):
    """Raised in a hook once everything that was wanted has been read."""


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


@contextmanager
def installed(taps: Taps, *, stop: bool = False) -> Iterator[None]:
    """Hooks of ``taps`` on the model inside the block; with ``stop``, the forward ends at the last one needed.

    Raises:
        RequestError: an operation failed inside the forward.
        InterpError: a hook did not fire, as in a compiled forward.
    """
    fired: set[SiteKey] = set()
    stopped = False
    handles = [_hook(site, taps, fired) for site in taps.program.sites.values()]
    if stop:
        handles.append(_stop_hook(taps.program))
    try:
        yield
    except StopForward:
        stopped = True
    finally:
        for handle in handles:
            handle.remove()
    # Writes behind the last block that anyone reads were passed over on purpose: they cannot change what was read.
    due = [site for site in taps.program.sites.values() if site.reads or site.sums or not stopped]
    silent = [site.leaf.role for site in due if site.key not in fired]
    if silent:
        raise InterpError(
            f"hooks on {', '.join(sorted(set(silent)))} never fired: the forward is compiled or skips these modules. "
            "Load the model without torch.compile"
        )


def _hook(site: Site, taps: Taps, fired: set[SiteKey]) -> Any:
    keep = taps.keeper(site)
    return _working_hook(site, taps, fired) if keep is None else _keeping_hook(site, keep, fired)


def _keeping_hook(site: Site, keep: Callable[[Tensor], None], fired: set[SiteKey]) -> Any:
    slot, key, thread = site.leaf.slot, site.key, get_ident()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != thread:
            return
        fired.add(key)
        keep(_argument(module, slot, args, kwargs)[1])

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() != thread:
            return
        fired.add(key)
        keep(output if isinstance(output, Tensor) else output[slot])

    if site.leaf.side == "input":
        return site.module.register_forward_pre_hook(before, with_kwargs=True)
    return site.module.register_forward_hook(after)


def _working_hook(site: Site, taps: Taps, fired: set[SiteKey]) -> Any:
    calls, thread = count(), get_ident()

    def passes() -> bool:
        """Whether this call of the module is not the one that is meant; another thread's forward never is."""
        if get_ident() != thread:
            return True
        if site.leaf.call not in (None, next(calls)):
            return True
        fired.add(site.key)
        return False

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if passes():
            return None
        name, raw = _argument(module, site.leaf.slot, args, kwargs)
        new = taps.visit(site, raw)
        if new is None:
            return None
        if isinstance(name, int):
            return (*args[:name], new, *args[name + 1 :]), kwargs
        return args, {**kwargs, name: new}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if passes():
            return None
        slot = site.leaf.slot
        raw = output if isinstance(output, Tensor) else output[slot]
        new = taps.visit(site, raw)
        if new is None or isinstance(output, Tensor):
            return new
        return type(output)((*output[:slot], new, *output[slot + 1 :]))

    if site.leaf.side == "input":
        return site.module.register_forward_pre_hook(before, with_kwargs=True)
    return site.module.register_forward_hook(after)


def _argument(module: nn.Module, slot: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
    """A module's input: a positional argument, or the keyword that transformers uses for it."""
    if slot < len(args) and isinstance(args[slot], Tensor):
        return slot, args[slot]
    if slot > 0:
        # Any tensor will not do: behind the first argument, only the signature says which one is meant.
        name = list(inspect.signature(module.forward).parameters)[slot]
        return name, kwargs[name]
    if "hidden_states" in kwargs:
        return "hidden_states", kwargs["hidden_states"]
    for name, value in kwargs.items():
        if torch.is_tensor(value):
            return name, value
    raise InterpError("a module was called without a tensor where one was expected")


def _stop_hook(program: Program) -> Any:
    last, thread = max(program.last_layer, 0), get_ident()

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == thread:
            raise StopForward

    return program.layout.module("block", last).register_forward_hook(end)
