"""Where a tensor lives, as data: a small expression over module sites that both reads and writes.

A :class:`Read` leaf names a module by *role* (``attn``, ``attn.o_proj``, ``mlp.down_proj``, ...) and a side
of it. Above leaves stand :class:`Slice` (part of a fused projection), :class:`Scale` (a multiplier applied
outside any module) and :class:`Sum` (a tensor that exists only as a sum). Values are flat: the last axis is
the product of the point's axes.

Nothing here imports torch: the functions use only methods of the tensors that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = ["Binding", "Expression", "Read", "Scale", "Slice", "Sum", "leaves", "read_value", "write_value"]


@frozen
class Read:
    """A module's input or output.

    Attributes:
        role: the module's role; its path is the backend's layout's affair.
        side: ``"input"`` or ``"output"``.
        slot: which positional argument, or which element of a tuple of outputs.
        heads_first: the tensor is ``[batch, heads, pos, dim]`` rather than ``[batch, pos, heads, dim]``.
    """

    role: str
    side: str = "output"
    slot: int = 0
    heads_first: bool = False


@frozen
class Slice:
    """Part of a wider tensor: its last axis is unflattened to ``shape`` and indexed by ``index``, from the left."""

    of: Expression
    shape: tuple[int, ...] = field(converter=as_tuple)
    index: tuple[int | slice, ...] = field(converter=as_tuple)


@frozen
class Scale:
    """A tensor times a constant that the model applies outside any module."""

    of: Expression
    factor: float


@frozen
class Sum:
    """Two tensors' sum. It is complete, and written, at the site of ``second``."""

    first: Expression
    second: Expression


Expression = Read | Slice | Scale | Sum


@frozen
class Binding:
    """How a backend reads a point, and how it writes it (``None``: as it reads)."""

    read: Expression
    write: Expression | None = None

    @property
    def writes_through(self) -> Expression:
        """The expression that a write goes through."""
        return self.read if self.write is None else self.write


def leaves(expression: Expression) -> Iterator[Read]:
    """The sites of an expression, in the order of the forward."""
    if isinstance(expression, Read):
        yield expression
    elif isinstance(expression, Sum):
        yield from leaves(expression.first)
        yield from leaves(expression.second)
    else:
        yield from leaves(expression.of)


def read_value(expression: Expression, leaf: Callable[[Read], Any]) -> Any:
    """The value of an expression, given each site's tensor (``[..., width]``). May be a view."""
    if isinstance(expression, Read):
        return leaf(expression)
    if isinstance(expression, Sum):
        return read_value(expression.first, leaf) + read_value(expression.second, leaf)
    inner = read_value(expression.of, leaf)
    if isinstance(expression, Scale):
        return inner * expression.factor
    return _flat(_part(inner, expression), inner.dim() - 1)


def write_value(expression: Expression, leaf: Callable[[Read], Any], old: Any, new: Any) -> Any:
    """What the last site's tensor must become so that the expression's value goes from ``old`` to ``new``.

    Where another term stands between, the *difference* is carried; where a constant does, entries that do not change
    stay. A write that changes nothing is then exactly nothing, whatever the rounding, and a zero through a constant is
    exactly zero.
    """
    if isinstance(expression, Read):
        return new
    if isinstance(expression, Scale):
        inner_old = read_value(expression.of, leaf)
        return write_value(expression.of, leaf, inner_old, inner_old.where(new == old, new / expression.factor))
    if isinstance(expression, Sum):
        second_old = read_value(expression.second, leaf)
        return write_value(expression.second, leaf, second_old, second_old + (new - old))
    inner_old = read_value(expression.of, leaf)
    inner_new = inner_old.clone()
    part = _part(inner_new, expression)
    part.copy_(new.reshape(part.shape))
    return write_value(expression.of, leaf, inner_old, inner_new)


def _part(tensor: Any, piece: Slice) -> Any:
    if math.prod(piece.shape) != tensor.shape[-1]:
        raise ValueError(f"a fused tensor of width {tensor.shape[-1]} does not unflatten to {piece.shape}")
    rest = (slice(None),) * (len(piece.shape) - len(piece.index))
    return tensor.unflatten(-1, piece.shape)[(..., *piece.index, *rest)]


def _flat(tensor: Any, leading: int) -> Any:
    return tensor.flatten(leading) if tensor.dim() > leading + 1 else tensor
