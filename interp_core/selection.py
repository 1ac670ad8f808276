"""Coordinates of an address as indices into a point's axes: the slice that a caller asked for, no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_core.address import COORDINATE_AXES, Address
from interp_core.profile import ModelProfile

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["axes_of", "select"]


def select(value: Tensor, axes: tuple[int, ...], coordinates: tuple[tuple[int, int], ...]) -> Tensor:
    """``[..., width]`` as ``[..., *axes]`` with the coordinates' axes indexed away."""
    if len(axes) > 1:
        value = value.unflatten(-1, axes)
    lead = value.dim() - len(axes)
    for axis, index in sorted(coordinates, reverse=True):
        value = value.select(lead + axis, index)
    return value


def axes_of(profile: ModelProfile, address: Address) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Sizes of a point's axes, and ``(axis number, index)`` per coordinate."""
    spec = profile.specs[address.name]
    sizes = tuple(profile.facts.axis_size(axis, address.layer) for axis in spec.axes)
    return sizes, tuple((spec.axes.index(COORDINATE_AXES[name]), index) for name, index in address.coordinates)
