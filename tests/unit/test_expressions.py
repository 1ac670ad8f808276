"""Expressions over module sites: what they read, and that a write puts back exactly what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from interp_core.expressions import (
    Binding,
    Expression,
    Learned,
    Read,
    Scale,
    Slice,
    Sum,
    leaves,
    read_value,
    write_value,
)

torch.set_num_threads(1)
A, B = Read("attn"), Read("mlp", side="input")


class Owner:
    """Parameters that a block applies itself."""

    weight = torch.linspace(0.5, 2.0, 12).to(torch.bfloat16)
    bias = torch.linspace(-1.0, 1.0, 12).to(torch.bfloat16)
    scalar = torch.tensor([0.75]).to(torch.bfloat16)


OWNER = Owner()


def sites(dtype: torch.dtype = torch.float32) -> dict[Read, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {leaf: torch.randn(2, 3, 12, generator=generator).to(dtype) for leaf in (A, B)}


def hand(found: dict[Read, Tensor]) -> dict[str, tuple[Expression, Tensor]]:
    a, b = found[A], found[B]
    fused = a.reshape(2, 3, 2, 3, 2)
    return {
        "read": (A, a),
        "slice": (Slice(A, (3, 4), (1,)), a[..., 4:8]),
        "slice of the last axis": (
            Slice(A, (3, 4), (slice(None), slice(1, 3))),
            a.reshape(2, 3, 3, 4)[..., 1:3].flatten(2),
        ),
        "one channel of each": (Slice(A, (3, 4), (slice(None), 2)), a[..., 2::4]),
        "fused heads": (Slice(A, (2, 3, 2), (slice(None), 1)), fused[:, :, :, 1].flatten(2)),
        "scale": (Scale(A, 0.3), a * 0.3),
        "sum": (Sum(A, B), a + b),
        "scaled slice": (Scale(Slice(A, (3, 4), (2,)), 4.0), a[..., 8:] * 4.0),
        "slice of a scaled sum": (Slice(Scale(Sum(A, B), 0.7), (2, 6), (0,)), ((a + b) * 0.7)[..., :6]),
        "learned": (Learned(A, OWNER, "weight"), a * OWNER.weight.to(a.dtype)),
        "learned, with a bias": (Learned(A, OWNER, "weight", "bias"), (a + OWNER.bias) * OWNER.weight),
        "learned, a bias alone": (Learned(A, OWNER, "", "bias"), a + OWNER.bias),
        "learned sum": (Learned(Sum(A, B), OWNER, "scalar"), (a + b) * OWNER.scalar),
        "sum of a learned": (Sum(Learned(A, OWNER, "weight", "bias"), B), (a + OWNER.bias) * OWNER.weight + b),
        "sum of a scale": (Sum(A, Scale(B, 0.22)), a + b * 0.22),
    }


CASES = sorted(hand(sites()))


def forward(expression: Expression, values: dict[Read, Tensor]) -> Tensor:
    found: Tensor = read_value(expression, values.__getitem__)
    return found


def written(
    expression: Expression, values: dict[Read, Tensor], change: Callable[[Tensor], Tensor]
) -> dict[Read, Tensor]:
    old = forward(expression, values)
    last = list(leaves(expression))[-1]
    return {**values, last: write_value(expression, values.__getitem__, old, change(old))}


@pytest.mark.parametrize("case", CASES)
def test_read(case: str) -> None:
    expression, by_hand = hand(sites())[case]
    torch.testing.assert_close(forward(expression, sites()), by_hand)


@pytest.mark.parametrize("case", CASES)
def test_a_write_is_read_back(case: str) -> None:
    values = sites(torch.float64)
    before = {leaf: tensor.clone() for leaf, tensor in values.items()}
    expression, by_hand = hand(values)[case]
    after = written(expression, values, lambda old: old * 2 + 1)
    torch.testing.assert_close(forward(expression, after), by_hand * 2 + 1)
    assert all(torch.equal(values[leaf], before[leaf]) for leaf in values), "changed in place"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writing_what_is_there_is_exactly_nothing(case: str, dtype: torch.dtype) -> None:
    values = sites(dtype)
    expression, _ = hand(values)[case]
    after = written(expression, values, lambda old: old.clone())
    assert all(torch.equal(after[leaf], values[leaf]) for leaf in values)
    assert all(after[leaf].dtype == dtype for leaf in values)


def test_a_write_leaves_the_other_slices_alone() -> None:
    values = sites()
    after = written(Slice(A, (3, 4), (1,)), values, torch.zeros_like)
    assert torch.equal(after[A][..., :4], values[A][..., :4])
    assert torch.equal(after[A][..., 8:], values[A][..., 8:])
    assert not bool(after[A][..., 4:8].any())


def test_a_sum_is_written_at_its_second_site() -> None:
    values = sites()
    after = written(Sum(A, B), values, lambda old: old + 1)
    assert torch.equal(after[A], values[A])
    torch.testing.assert_close(after[B], values[B] + 1)


def test_leaves_in_the_order_of_the_forward() -> None:
    expression = Sum(Slice(A, (3, 4), (0,)), Scale(Sum(B, A), 2.0))
    assert list(leaves(expression)) == [A, B, A]


def test_a_width_that_does_not_unflatten() -> None:
    with pytest.raises(ValueError, match=r"width 12 does not unflatten to \(5, 2\)"):
        forward(Slice(A, (5, 2), (0,)), sites())


def test_expressions_are_plain_values() -> None:
    made: Any = Slice(A, [3, 4], [1])
    assert made == Slice(A, (3, 4), (1,))
    assert Binding(made).writes_through is made
    assert Binding(made, write=A).writes_through is A
