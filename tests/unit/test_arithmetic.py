"""The arithmetic of each operation, against the same done by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp_core import Ablate, Add, Apply, Cap, NormScaledAdd, Replace, Scale, Swap
from interp_core.arithmetic import apply_operation
from interp_core.operations import Operation

torch.set_num_threads(1)
AT = "resid_post.0"
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 8, generator=GENERATOR, dtype=torch.float64)
V = 3 * torch.randn(8, generator=GENERATOR, dtype=torch.float64)
W = torch.randn(8, generator=GENERATOR, dtype=torch.float64) + V
ROWS = torch.randn(5, 8, generator=GENERATOR, dtype=torch.float64)
UNIT = V / V.norm()


def along(row: Tensor) -> float:
    return float(sum(a * b for a, b in zip(row.tolist(), UNIT.tolist(), strict=True)))


def swapped(row: Tensor) -> Tensor:
    """Solve for the coefficients on both unit directions, and exchange them."""
    basis = torch.stack([UNIT, W / W.norm()], dim=1)
    found = torch.linalg.lstsq(basis, row[:, None]).solution[:, 0]
    rest = row - basis @ found
    return rest + basis @ found.flip(0)


CASES: dict[str, tuple[Operation, Callable[[Tensor], Tensor]]] = {
    "add": (Add(AT, V), lambda row: row + V),
    "add scaled": (Add(AT, V, scale=-0.5), lambda row: row - 0.5 * V),
    "scale": (Scale(AT, V, factor=3.0), lambda row: row + 2 * along(row) * UNIT),
    "scale to nothing": (Scale(AT, V), lambda row: row - along(row) * UNIT),
    "scale by one": (Scale(AT, V, factor=1.0), lambda row: row),
    "cap high": (Cap(AT, V, high=0.2), lambda row: row + (min(along(row), 0.2) - along(row)) * UNIT),
    "cap low": (Cap(AT, V, low=0.2), lambda row: row + (max(along(row), 0.2) - along(row)) * UNIT),
    "cap both": (
        Cap(AT, V, low=-0.1, high=0.1),
        lambda row: row + (min(max(along(row), -0.1), 0.1) - along(row)) * UNIT,
    ),
    "norm-scaled add": (NormScaledAdd(AT, V, scale=0.5), lambda row: row + 0.5 * row.norm() * UNIT),
    "ablate a direction": (Ablate(AT, V), lambda row: row - along(row) * UNIT),
    "ablate": (Ablate(AT), torch.zeros_like),
    "swap": (Swap(AT, V, W), swapped),
    "replace by one": (Replace(AT, V), lambda row: V),
    "apply": (Apply(AT, lambda x: x * 2), lambda row: row * 2),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case: str) -> None:
    operation, by_hand = CASES[case]
    before = X.clone()
    out = apply_operation(operation, X)
    torch.testing.assert_close(out, torch.stack([by_hand(row) for row in X]), rtol=1e-10, atol=1e-10)
    assert torch.equal(before, X), "changed in place"
    assert out.data_ptr() != X.data_ptr()


def test_replace_by_rows() -> None:
    out = apply_operation(Replace(AT, ROWS), X)
    assert torch.equal(out, ROWS)
    out.zero_()
    assert bool(ROWS.any()), "the caller's own rows were handed out"


def test_replace_by_one_can_be_changed_row_by_row() -> None:
    out = apply_operation(Replace(AT, V), X)
    out[0] = 0.0
    assert torch.equal(out[1], V)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_the_models_own_dtype(case: str, dtype: torch.dtype) -> None:
    operation, by_hand = CASES[case]
    x = X.to(dtype)
    out = apply_operation(operation, x)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    expected = torch.stack([by_hand(row) for row in x.double()])
    # One rounding of the result, and one of the vector itself.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_wide_projection_is_summed_in_float32() -> None:
    x = torch.full((1, 4096), 0.1).to(torch.bfloat16)
    out = apply_operation(Scale(AT, torch.ones(4096), factor=0.0), x)
    assert float(out.abs().max()) < 1e-3


def test_an_orthogonal_swap_exchanges_two_channels() -> None:
    first, second = torch.eye(8, dtype=torch.float64)[2], torch.eye(8, dtype=torch.float64)[5]
    out = apply_operation(Swap(AT, first, second), X)
    expected = X.clone()
    expected[:, [2, 5]] = X[:, [5, 2]]
    torch.testing.assert_close(out, expected)


def test_swapping_twice_is_nothing() -> None:
    operation = Swap(AT, V, W)
    torch.testing.assert_close(apply_operation(operation, apply_operation(operation, X)), X)


def test_no_rows() -> None:
    for operation, _ in CASES.values():
        assert apply_operation(operation, X[:0]).shape == (0, 8)


def test_a_subclass_has_its_bases_arithmetic_and_a_stranger_has_none() -> None:
    class Mine(Add):
        pass

    assert torch.equal(apply_operation(Mine(AT, V), X), X + V)
    with pytest.raises(TypeError, match="no arithmetic for the operation Operation"):
        apply_operation(Operation(AT), X)


def test_gradients_pass() -> None:
    for name in set(CASES) - {"ablate", "replace by one"}:
        x = X.clone().requires_grad_()
        apply_operation(CASES[name][0], x).sum().backward()
        assert x.grad is not None, name
