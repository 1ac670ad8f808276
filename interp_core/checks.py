"""One identity at one place, with its control, and how far apart two tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from interp_core.converters import as_tuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Check", "Get", "apart", "difference", "misfit", "tolerance_of"]

_TIGHT: Final = 1e-3

_TOLERANCE: Final = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative to the largest value. Halves are compared after sums that the model rounded in another order."""

Get = Callable[[str, int | None], "Tensor | None"]
"""A captured tensor ``[pos, *axes]`` (attention: ``[heads, query, key]``), or ``None`` if there is none."""


def tolerance_of(dtype: Any) -> float:
    """Largest error of an identity between tensors of a dtype, given by name or as torch's own."""
    return _TOLERANCE.get(str(dtype).removeprefix("torch."), 3e-2)


@frozen(kw_only=True)
class Check:
    """One identity at one place.

    Attributes:
        identity: what was compared.
        layer: where, or ``None`` for the trunk.
        proves: points whose values it pins down: by name (``z``) those of its own layer, or of the trunk; as an
            address (``resid_pre.4``) those of another layer.
        error: largest difference, relative to the largest value (see :func:`difference`).
        control: the same figure for a deliberately wrong variant; ``None`` where no variant exists, and then it can
            fail and prove nothing.
        tolerance: largest error that passes. The control must fail, by ten times where the tolerance is tight;
            that of half precision is so wide that ten times it is more than real tensors differ.
        concerns: points, named as in ``proves``, that are wrong if it fails and not proven if it holds: such as
            those that are written.
    """

    identity: str
    layer: int | None
    proves: tuple[str, ...] = field(converter=as_tuple)
    error: float
    control: float | None
    tolerance: float
    concerns: tuple[str, ...] = field(default=(), converter=as_tuple)

    @property
    def holds(self) -> bool:
        """Whether the identity holds and its control fails."""
        margin = 10 if self.tolerance < _TIGHT else 1
        return not self.fails and (self.control is None or self.control > margin * self.tolerance)

    @property
    def fails(self) -> bool:
        """Whether the tensors contradict it. If not, and it does not hold either, a wrong variant fits as well."""
        return not self.error <= self.tolerance

    @property
    def proof(self) -> bool:
        """Whether it holds, and a wrong variant of it does not: only then it pins its points down."""
        return self.holds and self.control is not None

    def describe(self) -> str:
        """One sentence with its numbers."""
        where = "" if self.layer is None else f" at layer {self.layer}"
        control = "none" if self.control is None else f"{self.control:.1e}"
        verdict = "holds" if self.holds else "fails" if self.fails else "says nothing"
        return (
            f"'{self.identity}'{where} {verdict}: error {self.error:.1e}, control {control}, "
            f"tolerance {self.tolerance:.0e}"
        )


def difference(x: Tensor, y: Tensor) -> float:
    """Largest difference of ``x`` from ``y``, relative to the largest value of ``y``; and their norms' ratio.

    The larger of the two is given, so that neither one wrong entry nor a wrong scale passes.
    """
    x, y = x.double(), y.double()
    if x.shape != y.shape:
        return float("inf")
    scale = float(y.abs().max())
    worst = float((x - y).abs().max())
    if scale == 0.0:
        return worst
    ratio = abs(float(x.norm() / y.norm()) - 1.0)
    return max(worst / scale, ratio)


def apart(got: Tensor, want: Tensor) -> float:
    """:func:`difference` of two tensors of one shape that may hold ``-inf`` at the same places; 0 if bit-equal."""
    if got.numel() == 0 or bool((got == want).all()):
        return 0.0
    if bool((got.isinf() != want.isinf()).any()):
        return float("inf")
    return difference(got.double().nan_to_num(neginf=0.0), want.double().nan_to_num(neginf=0.0))


def misfit(value: Tensor, total: Tensor, terms: tuple[Tensor, ...]) -> float:
    """Largest difference beyond rounding, relative to what the contributions change, not to the residual.

    A residual can be ten thousand times a contribution: measured against it, a wrong contribution would pass.
    """
    import torch

    sizes = [term.double().abs() for term in (*terms, total)]
    rounding = torch.finfo(total.dtype).eps * sum(sizes[1:], sizes[0])
    excess = ((value.double() - total.double()).abs() - rounding).clamp(min=0)
    changed = (total.double() - terms[0].double()).abs().max()
    return float(excess.max() / changed) if float(changed) else float(excess.max())
