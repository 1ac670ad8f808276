"""What may be done to a tensor during a forward: specifications only.

An operation names an address and gives its numbers; the arithmetic of each is one torch function in
:mod:`interp_core.arithmetic`, which every backend calls. A vector has the shape of the point's axes
(after coordinates), or their flat length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from interp_core.address import Address, AddressPattern, parse_pattern

__all__ = ["Ablate", "Add", "Apply", "Cap", "NormScaledAdd", "Operation", "Replace", "Scale", "Swap"]


def _target(value: object) -> Address | AddressPattern:
    pattern = parse_pattern(value)
    return pattern if pattern.layers is not None else pattern.address


@frozen(eq=False)
class Operation:
    """Base of all operations.

    Attributes:
        address: the tensor to change; a range of layers stands for the same operation on each.
    """

    address: Address | AddressPattern = field(converter=_target)

    tensor_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that hold a vector of the point's shape."""

    def at(self, address: Address) -> Operation:
        """The same operation on another address."""
        return evolve(self, address=address)


@frozen(eq=False)
class Add(Operation):
    """``x + scale * vector``."""

    vector: Any = field(repr=False)
    scale: float = 1.0
    tensor_fields: ClassVar[tuple[str, ...]] = ("vector",)


@frozen(eq=False)
class Scale(Operation):
    """Multiply the component of ``x`` along ``vector`` by ``factor``; the rest is untouched."""

    vector: Any = field(repr=False)
    factor: float = 0.0
    tensor_fields: ClassVar[tuple[str, ...]] = ("vector",)


@frozen(eq=False)
class Cap(Operation):
    """Hold the component of ``x`` along the unit ``vector`` between ``low`` and ``high``."""

    vector: Any = field(repr=False)
    low: float | None = None
    high: float | None = None
    tensor_fields: ClassVar[tuple[str, ...]] = ("vector",)


@frozen(eq=False)
class NormScaledAdd(Operation):
    """``x + scale * |x| * unit(vector)``: a step in proportion to each row's own norm."""

    vector: Any = field(repr=False)
    scale: float = 1.0
    tensor_fields: ClassVar[tuple[str, ...]] = ("vector",)


@frozen(eq=False)
class Ablate(Operation):
    """Remove the component of ``x`` along ``vector``; without a vector, set ``x`` to zero."""

    vector: Any = field(default=None, repr=False)
    tensor_fields: ClassVar[tuple[str, ...]] = ("vector",)


@frozen(eq=False)
class Swap(Operation):
    """Exchange the components of ``x`` along two directions (not parallel to each other)."""

    first: Any = field(repr=False)
    second: Any = field(repr=False)
    tensor_fields: ClassVar[tuple[str, ...]] = ("first", "second")


@frozen(eq=False)
class Replace(Operation):
    """Put ``value`` in place of ``x``: one vector for every position, or one row per written position."""

    value: Any = field(repr=False)
    tensor_fields: ClassVar[tuple[str, ...]] = ("value",)


@frozen(eq=False)
class Apply(Operation):
    """Put ``fn(x)`` in place of ``x``: any callable from rows ``[rows, *axes]`` to the same shape.

    A callable cannot leave the process safely, so only in-process backends serve it.
    """

    fn: Callable[[Any], Any]
