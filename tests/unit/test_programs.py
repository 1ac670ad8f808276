"""Operations as data give what the operations' own arithmetic gives, on whole rows and on slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from interp_core import Ablate, Add, Apply, Cap, NormScaledAdd, Replace, Scale, Swap
from interp_core.arithmetic import apply_operation
from interp_core.programs import NUMBERS, VECTORS, program_of, run_programs

WIDTH = 24
A = "resid_post.1"
GENERATOR = torch.Generator().manual_seed(0)


def vector(width: int) -> Tensor:
    return torch.randn(width, generator=GENERATOR)


def operations(width: int) -> list[Any]:
    v, w = vector(width), vector(width)
    return [
        Add(A, v, scale=-2.0),
        Scale(A, v, factor=0.3),
        Scale(A, v, factor=-4.0),
        Cap(A, v, low=-0.2, high=0.1),
        Cap(A, v, high=0.0),
        Cap(A, v, low=5.0),
        NormScaledAdd(A, v, scale=0.7),
        Ablate(A),
        Ablate(A, v),
        Swap(A, v, w),
        Replace(A, v),
    ]


def tables(operation: Any, place: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    program = program_of(operation, place, WIDTH)
    bank = torch.stack([torch.zeros(WIDTH), *program.vectors.values()])
    index = torch.zeros(rows, len(VECTORS), dtype=torch.long)
    for i, name in enumerate(program.vectors, start=1):
        index[:, VECTORS.index(name)] = i
    return bank, index, torch.tensor(program.numbers).expand(rows, len(NUMBERS))


@pytest.mark.parametrize("number", range(11))
@pytest.mark.parametrize("span", [(0, WIDTH), (8, 16)], ids=["whole", "slice"])
def test_a_program_is_its_operation(number: int, span: tuple[int, int]) -> None:
    start, stop = span
    operation = operations(stop - start)[number]
    x = torch.randn(5, WIDTH, generator=GENERATOR)
    want = x.clone()
    want[:, start:stop] = apply_operation(operation, x[:, start:stop])
    found = run_programs(x, *tables(operation, torch.arange(start, stop), 5))
    assert torch.allclose(found, want, atol=1e-5, rtol=1e-5)
    assert (found - x).abs().max() > 1e-2
    assert torch.equal(found[:, :start], x[:, :start])
    assert torch.equal(found[:, stop:], x[:, stop:])


def test_zeros_change_nothing_bit_for_bit() -> None:
    x = torch.randn(7, WIDTH, generator=GENERATOR)
    index = torch.zeros(7, len(VECTORS), dtype=torch.long)
    same = run_programs(x, torch.zeros(3, WIDTH), index, torch.zeros(7, len(NUMBERS)))
    assert torch.equal(same, x)
    half = x.bfloat16()
    assert torch.equal(run_programs(half, torch.zeros(3, WIDTH), index, torch.zeros(7, len(NUMBERS))), half)


def test_one_value_per_row_stays_one_vector_per_row() -> None:
    values = torch.randn(3, 8, generator=GENERATOR)
    program = program_of(Replace(A, values), torch.arange(8, 16), WIDTH)
    assert program.vectors["constant"].shape == (3, WIDTH)
    assert torch.equal(program.vectors["constant"][:, 8:16], values)


def test_a_callable_cannot_be_data() -> None:
    with pytest.raises(TypeError, match="Apply"):
        program_of(Apply(A, lambda x: x), torch.arange(4), WIDTH)
