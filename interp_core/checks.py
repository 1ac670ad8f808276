"""One identity at one place, with its control, and how far apart two tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from interp_core.converters import as_tuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Check", "Get", "difference", "misfit"]

_TIGHT: Final = 1e-3

Get = Callable[[str, int | None], "Tensor | None"]
"""A captured tensor ``[pos, *axes]`` (attention: ``[heads, query, key]``), or ``None`` if there is none."""


@frozen(kw_only=True)
class Check:
    """One identity at one place.

    Attributes:
        identity: what was compared.
        layer: where, or ``None`` for the trunk.
        proves: names of the points whose values it pins down.
        error: largest difference, relative to the largest value (see :func:`difference`).
        control: the same figure for a deliberately wrong variant; ``None`` where no variant exists.
        tolerance: largest error that passes. The control must fail, by ten times where the tolerance is tight;
            that of half precision is so wide that ten times it is more than real tensors differ.
    """

    identity: str
    layer: int | None
    proves: tuple[str, ...] = field(converter=as_tuple)
    error: float
    control: float | None
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the identity holds and its control fails."""
        margin = 10 if self.tolerance < _TIGHT else 1
        return self.error <= self.tolerance and (self.control is None or self.control > margin * self.tolerance)


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
