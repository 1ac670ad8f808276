"""Least squares on captured tensors: what a stranger can find out of a part whose weights are not looked at."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from interp_core.checks import difference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fit_combination", "fit_factor", "fit_gain", "normalised"]

_SMALL: Final = 1e-3
"""A coefficient below this is no part of an explanation."""


def normalised(x: Tensor, eps: float, *, centred: bool) -> Tensor:
    """``x`` as an RMS norm, or ``centred`` as a layer norm, leaves it before its gain."""
    if centred:
        x = x - x.mean(-1, keepdim=True)
    normal: Tensor = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normal


def fit_gain(x: Tensor, y: Tensor, *, centred: bool) -> tuple[float, float]:
    """How far the best ``gain * x`` (``+ bias``) per channel is from ``y``, and how much the gains differ.

    ``x`` and ``y`` are ``[pos, *channels]``.
    """
    x, y = x.flatten(1), y.flatten(1)
    means = (x.mean(0), y.mean(0)) if centred else (0.0, 0.0)
    dx, dy = x - means[0], y - means[1]
    gain = (dx * dy).sum(0) / dx.square().sum(0).clamp(min=1e-300)
    return difference(gain * dx + means[1], y), float(gain.std() / gain.abs().mean().clamp(min=1e-300))


def fit_factor(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The one number that ``x`` times comes closest to ``y``, and how far that is from it."""
    if x.shape != y.shape:
        return 0.0, float("inf")
    x, y = x.double(), y.double()
    factor = float((x * y).sum() / x.square().sum().clamp(min=1e-300))
    return factor, difference(factor * x, y)


def fit_combination(y: Tensor, parts: Mapping[str, Tensor], tolerance: float, most: int = 2) -> dict[str, float]:
    """The fewest of ``parts`` whose sum, each times a number, is ``y``; empty if no ``most`` of them are.

    Of several answers with as many parts, the first that is about as close as any is given.
    """
    import torch

    wanted = y.double().flatten()
    columns = {name: part.double().flatten() for name, part in parts.items() if part.shape == y.shape}
    for count in range(1, most + 1):
        found: tuple[float, dict[str, float]] | None = None
        for names in itertools.combinations(columns, count):
            stack = torch.stack([columns[name] for name in names], dim=1)
            numbers = torch.linalg.lstsq(stack, wanted[:, None]).solution[:, 0]
            error = difference(stack @ numbers, wanted)
            if error <= tolerance and float(numbers.abs().min()) > _SMALL and (found is None or 2 * error < found[0]):
                found = error, dict(zip(names, numbers.tolist(), strict=True))
        if found is not None:
            return found[1]
    return {}
