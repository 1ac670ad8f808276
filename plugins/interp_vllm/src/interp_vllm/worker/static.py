"""Declared taps inside a compiled forward: copies into buffers of fixed address, and writes from tables.

Everything is installed before the forward is compiled, and never changes afterwards. The hooks hold tensor operations
only, so that the compiler traces through them and a replayed graph repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn

from interp_core.address import Address
from interp_core.errors import BackendUnavailable, RequestError
from interp_core.expressions import Expression, Read, leaves, read_value, write_value
from interp_core.profile import ModelProfile
from interp_core.programs import program_of
from interp_core.requests import written
from interp_core.selection import axes_of, select
from interp_vllm.worker.bindings import Tree
from interp_vllm.worker.frame import parameter_names
from interp_vllm.worker.rows import Span, kept_copy
from interp_vllm.worker.state import PlacedProgram, RequestState
from interp_vllm.worker.sums import halves_of
from interp_vllm.worker.tables import ProgramTable

__all__ = ["StaticTaps"]

SiteKey = tuple[int, str]
_OUTPUT: Final = "output"


@define(eq=False)
class _Site:
    """What the graph does at one side of one module: writes first, then reads."""

    module: nn.Module
    writes: list[tuple[Expression, ProgramTable]] = field(factory=list)
    reads: list[tuple[Expression, Address]] = field(factory=list)


class StaticTaps:
    """Taps and write sites of one model.

    Attributes:
        buffers: per declared address ``[tokens, width]``, in the model's dtype; rows of the last step.
        tables: per declared write, its programs.
    """

    def __init__(self, tree: Tree, profile: ModelProfile, *, tokens: int, dtype: torch.dtype, device: Any) -> None:
        self.tree, self.profile = tree, profile
        self.batched = tree.style == "transformers"
        self.buffers: dict[Address, Tensor] = {}
        self.tables: dict[Address, ProgramTable] = {}
        sites: dict[SiteKey, _Site] = {}
        for number, address in enumerate(profile.static_writes):
            width = self._width(address)
            self.tables[address] = ProgramTable(number, width, tokens, torch.device(device))
            expression = tree.bind(address).writes_through
            self._site(sites, expression, address).writes.append((expression, self.tables[address]))
        for address in profile.static_points:
            self.buffers[address] = torch.zeros(tokens, self._width(address), dtype=dtype, device=device)
            expression = tree.bind(address).read
            self._site(sites, expression, address).reads.append((expression, address))
        for (_, side), site in sites.items():
            self._install(site, side)

    # A request, and a step.

    def place(self, state: RequestState) -> None:
        """Put the vectors of a request's writes into the tables."""
        for write in state.request.writes:
            table = self.tables[write.address.bare()]
            axes, coordinates = axes_of(self.profile, write.address)
            numbering = torch.arange(table.width)[None]
            place = select(numbering, axes, coordinates).reshape(-1)
            program = program_of(write.operation, place, table.width)
            state.programs.append(PlacedProgram(table, write, table.reserve(program), program.numbers))

    def forget(self, state: RequestState) -> None:
        """Take them out again."""
        for placed in state.programs:
            placed.table.release(placed.slots)
        state.programs.clear()

    def fill(self, spans: Sequence[Span], states: Mapping[str, RequestState]) -> None:
        """Say for each row of the coming step what is done to it."""
        for span in spans:
            state = states[span.request]
            try:
                for placed in state.programs:
                    rows, order = written(placed.write, span.position, span.length, state.request.prompt_length)
                    if rows and state.error is None:
                        placed.table.put([span.start + row for row in rows], placed.slots, placed.numbers, order)
            except RequestError as error:
                state.error = f"{type(error).__name__}: {error}"

    def clear(self) -> None:
        """After the step: nothing is done to any row."""
        for table in self.tables.values():
            table.clear()

    def harvest(self, spans: Sequence[Span], states: Mapping[str, RequestState]) -> None:
        """Copy each request's rows out of the buffers, before the next step writes over them."""
        for span in spans:
            state = states[span.request]
            if state.error is not None:
                continue
            for address, store in state.stores.items():
                chosen = store.chosen(span.position, span.length)
                if chosen != []:
                    rows = self.buffers[address.bare()][span.start : span.stop]
                    store.add(
                        span.position, span.length, kept_copy(select(rows, *axes_of(self.profile, address)), chosen)
                    )

    # Installation.

    def _width(self, address: Address) -> int:
        sizes, _ = axes_of(self.profile, address)
        width = 1
        for size in sizes:
            width *= size
        return width

    def _site(self, sites: dict[SiteKey, _Site], expression: Expression, address: Address) -> _Site:
        places = {(leaf.role, leaf.side) for leaf in leaves(expression)}
        if len(places) > 1:
            raise BackendUnavailable(
                f"{address} is a sum of tensors of different modules here, which a compiled forward has no tap for"
            )
        ((role, side),) = places
        layout = self.tree.layout
        module = layout.module(role, None if role in layout.trunk else address.layer)
        return sites.setdefault((id(module), side), _Site(module))

    def _install(self, site: _Site, side: str) -> None:
        if side == _OUTPUT:
            site.module.register_forward_hook(self._after(site))
        else:
            site.module.register_forward_pre_hook(self._before(site, parameter_names(site.module)), with_kwargs=True)

    def _after(self, site: _Site) -> Callable[..., Any]:
        work = self._work(site)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, Tensor):
                changed = work([output])
                return changed.get(0)
            changed = work(list(output))
            return tuple(changed.get(i, part) for i, part in enumerate(output)) if changed else None

        return after

    def _before(self, site: _Site, names: tuple[str, ...]) -> Callable[..., Any]:
        work = self._work(site)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = [*args, *(kwargs.get(name) for name in names[len(args) :])]
            changed = work(given)
            if not changed:
                return None
            new_args = tuple(changed.get(i, value) for i, value in enumerate(args))
            later = {names[i]: tensor for i, tensor in changed.items() if i >= len(args)}
            return new_args, {**kwargs, **later}

        return before

    def _work(self, site: _Site) -> Callable[[list[Any]], dict[int, Tensor]]:
        """Tensors of a call in, those that were changed out, by slot."""
        taps = [(expression, self.buffers[address]) for expression, address in site.reads]
        writes = [(expression, table.site) for expression, table in site.writes]
        batched = self.batched

        def work(tensors: list[Any]) -> dict[int, Tensor]:
            changed: dict[int, Tensor] = {}

            def value(leaf: Read) -> Tensor:
                return _rows(changed.get(leaf.slot, tensors[leaf.slot]), leaf, batched)

            for expression, number in writes:
                if (halves := halves_of(expression)) is not None:
                    # In place, and without the sum as a tensor of its own: a site that nobody writes costs one call.
                    torch.ops.interp_vllm.write_sum(*map(value, halves), number)
                    continue
                old = read_value(expression, value)
                new = old.clone(memory_format=torch.contiguous_format)
                torch.ops.interp_vllm.write(new, number)
                *_, leaf = leaves(expression)
                changed[leaf.slot] = _like(write_value(expression, value, old, new), tensors[leaf.slot], leaf, batched)
            for expression, buffer in taps:
                found = read_value(expression, value)
                buffer[: found.shape[0]].copy_(found)
            return changed

        return work


def _rows(tensor: Tensor, leaf: Read, batched: bool) -> Tensor:
    """``[tokens, width]``; transformers' tree has a batch axis of one before the tokens."""
    if leaf.heads_first:
        tensor = tensor.transpose(-3, -2)
    if batched:
        tensor = tensor[0]
    return tensor.flatten(1) if tensor.dim() > 2 else tensor


def _like(rows: Tensor, tensor: Tensor, leaf: Read, batched: bool) -> Tensor:
    if leaf.heads_first:
        return rows.reshape(tensor.transpose(-3, -2).shape).transpose(-3, -2)
    return rows.reshape(tensor.shape)
