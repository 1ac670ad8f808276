"""The table of programs of one write site, at fixed addresses, and the operation in the graph that reads it.

The graph holds one call per site, ``torch.ops.interp_vllm.write``, or ``write_sum`` where vLLM carries the tensor in
two halves. What it does to a row is data: the table is filled before each step, so the same graph serves every
request. On a CPU the call runs Python, and touches no row that nobody writes; where a graph is replayed its kernels
run over all rows, and a row without a program stays as it is.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from interp_core.errors import RequestError
from interp_core.programs import NUMBERS, VECTORS, Program, run_programs
from interp_vllm.static import CAPACITY, DEPTH
from interp_vllm.worker.sums import rewritten

__all__ = ["ProgramTable", "write", "write_sum"]

_TABLES: Final[dict[int, ProgramTable]] = {}


class ProgramTable:
    """Programs per row of the step, up to ``DEPTH`` one after the other.

    Attributes:
        site: the number by which the graph calls it.
    """

    def __init__(self, site: int, width: int, tokens: int, device: torch.device) -> None:
        self.site = site
        self.width = width
        self._bank = torch.zeros(CAPACITY, width, dtype=torch.float32, device=device)
        self._index = torch.zeros(DEPTH, tokens, len(VECTORS), dtype=torch.long, device=device)
        self._numbers = torch.zeros(DEPTH, tokens, len(NUMBERS), dtype=torch.float32, device=device)
        self._free = list(range(CAPACITY - 1, 0, -1))  # row 0 stays zero: the vector of a program that has none
        self._levels: dict[int, int] = {}
        _TABLES[site] = self

    def reserve(self, program: Program) -> dict[str, list[int]]:
        """Put a program's vectors into the bank; where they are.

        Raises:
            RequestError: the bank is full.
        """
        wanted = {name: vector.reshape(-1, self.width) for name, vector in program.vectors.items()}
        needed = sum(len(rows) for rows in wanted.values())
        if needed > len(self._free):
            raise RequestError(
                f"{needed} vectors do not fit beside the {CAPACITY - 1 - len(self._free)} of other requests at one "
                f"write site (of {CAPACITY - 1}); use backend='vllm', or fewer rows at once"
            )
        slots = {name: [self._free.pop() for _ in rows] for name, rows in wanted.items()}
        for name, rows in wanted.items():
            self._bank[slots[name]] = rows.to(self._bank)
        return slots

    def release(self, slots: dict[str, list[int]]) -> None:
        """Give a program's place back."""
        for taken in slots.values():
            self._free.extend(taken)

    def put(self, rows: list[int], slots: dict[str, list[int]], numbers: tuple[float, ...], order: list[int]) -> None:
        """Run a program on rows of the coming step, after what was put before.

        Args:
            rows: of the step.
            slots: as :meth:`reserve` gave them.
            numbers: of the program.
            order: per row, which of several values of a vector is its own.

        Raises:
            RequestError: a row has ``DEPTH`` programs already.
        """
        levels = [self._levels.get(row, 0) for row in rows]
        if max(levels) >= DEPTH:
            raise RequestError(f"more than {DEPTH} operations on one position of one point in a compiled forward")
        index = torch.zeros(len(rows), len(VECTORS), dtype=torch.long)
        for name, places in slots.items():
            own = [places[i] for i in order] if len(places) > 1 else places * len(rows)
            index[:, VECTORS.index(name)] = torch.tensor(own)
        self._index[levels, rows] = index.to(self._index)
        self._numbers[levels, rows] = torch.tensor(numbers).to(self._numbers)
        for row, level in zip(rows, levels, strict=True):
            self._levels[row] = level + 1

    def clear(self) -> None:
        """No row has a program any more."""
        if self._levels:
            rows = list(self._levels)
            self._index[:, rows] = 0
            self._numbers[:, rows] = 0.0
            self._levels.clear()

    def apply(self, x: Tensor) -> None:
        """Change ``x`` (``[rows, width]``) in place."""
        if x.device.type == "cpu":
            if self._levels:
                rows = self._written()
                x[rows] = self._run(x[rows], rows, max(self._levels.values()))
            return
        x.copy_(self._run(x, torch.arange(x.shape[0], device=x.device), DEPTH))

    def apply_sum(self, first: Tensor, second: Tensor) -> None:
        """Change two tensors ``[rows, width]`` in place, of which only the sum is ever used."""
        if first.device.type == "cpu":
            if self._levels:
                rows = self._written()
                first[rows], second[rows] = self._halves(first[rows], second[rows], rows, max(self._levels.values()))
            return
        halves = self._halves(first, second, torch.arange(first.shape[0], device=first.device), DEPTH)
        for tensor, half in zip((first, second), halves, strict=True):
            tensor.copy_(half)

    def _written(self) -> Tensor:
        return torch.tensor(sorted(self._levels))

    def _halves(self, first: Tensor, second: Tensor, rows: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        old = first + second
        return rewritten(first, second, old, self._run(old, rows, depth))

    def _run(self, x: Tensor, rows: Tensor, depth: int) -> Tensor:
        for level in range(depth):
            x = run_programs(x, self._bank, self._index[level, rows], self._numbers[level, rows])
        return x


@torch.library.custom_op("interp_vllm::write", mutates_args=("x",))
def write(x: Tensor, site: int) -> None:
    """Run the programs of a site on the rows ``x``."""
    _TABLES[site].apply(x)


@write.register_fake
def _(x: Tensor, site: int) -> None:
    return None


@torch.library.custom_op("interp_vllm::write_sum", mutates_args=("first", "second"))
def write_sum(first: Tensor, second: Tensor, site: int) -> None:
    """Run the programs of a site on the sum of ``first`` and ``second``; rows that nobody writes cost nothing."""
    _TABLES[site].apply_sum(first, second)


@write_sum.register_fake
def _(first: Tensor, second: Tensor, site: int) -> None:
    return None
