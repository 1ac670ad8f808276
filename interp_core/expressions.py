"""Where a tensor lives, as data: a small expression over module sites that both reads and writes.

A :class:`Read` leaf names a module by *role* (``attn``, ``attn.o_proj``, ``mlp.down_proj``, ...) and a side
of it. Above leaves stand :class:`Slice` (part of a fused projection), :class:`Permute` (axes in another order),
:class:`Scale` (a multiplier applied outside any module), :class:`Learned` (weights that the model applies outside any
module), :class:`Sum` (a tensor that exists only as a sum) and :class:`Derived` (a function of a tensor, which is only
read). Values are flat: the last axis is the product of the point's axes.

Nothing here imports torch: the functions use only methods of the tensors that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = [
    "Binding",
    "Derived",
    "Expression",
    "Learned",
    "Permute",
    "Place",
    "Read",
    "Scale",
    "Slice",
    "Sum",
    "derives",
    "leaves",
    "read_value",
    "spread",
    "write_value",
]


@frozen
class Read:
    """A module's input or output.

    Attributes:
        role: the module's role; its path is the backend's layout's affair.
        side: ``"input"`` or ``"output"``.
        slot: which positional argument, or which element of a tuple of outputs.
        call: which of the module's calls in a forward, from 0; ``None`` where there is one.
        heads_first: the tensor is ``[batch, heads, pos, dim]`` rather than ``[batch, pos, heads, dim]``.
        merged: the tensor is ``[batch * pos, heads, dim]``.
        streams_first: the tensor is ``[streams, batch, pos, d_model]`` rather than ``[batch, pos, streams, d_model]``.
    """

    role: str
    side: str = "output"
    slot: int = 0
    call: int | None = None
    heads_first: bool = False
    merged: bool = False
    streams_first: bool = False


@frozen
class Slice:
    """Part of a wider tensor: its last axis is unflattened to ``shape`` and indexed by ``index``, from the left."""

    of: Expression
    shape: tuple[int, ...] = field(converter=as_tuple)
    index: tuple[int | slice, ...] = field(converter=as_tuple)


@frozen
class Permute:
    """A tensor with its axes in another order: the last axis is unflattened to ``shape``, and permuted by ``order``."""

    of: Expression
    shape: tuple[int, ...] = field(converter=as_tuple)
    order: tuple[int, ...] = field(converter=as_tuple)


@frozen
class Scale:
    """A tensor times a constant that the model applies outside any module."""

    of: Expression
    factor: float


@frozen(eq=False)
class Learned:
    """A tensor plus a bias, times a weight, which are parameters that the model applies outside any module's forward.

    Attributes:
        of: the tensor.
        owner: the module that holds the parameters, as a binding finds it.
        weight, bias: their names there; they have one element per channel, or one in all. An empty name is none.
    """

    of: Expression
    owner: Any
    weight: str
    bias: str = ""

    def applied(self, value: Any) -> Any:
        """What the model makes of the tensor's value."""
        shifted = value + getattr(self.owner, self.bias) if self.bias else value
        return shifted * getattr(self.owner, self.weight) if self.weight else shifted

    def undone(self, value: Any) -> Any:
        """The tensor's value that gives ``value``."""
        shifted = value / getattr(self.owner, self.weight) if self.weight else value
        return shifted - getattr(self.owner, self.bias) if self.bias else shifted


@frozen
class Sum:
    """Two tensors' sum. It is complete, and written, at the site of ``second``."""

    first: Expression
    second: Expression


@frozen(eq=False)
class Place:
    """Where the rows that a :class:`Derived` function is given stand.

    Attributes:
        layer: the layer, or ``None`` for a trunk point.
        positions: ``[...]`` absolute position of each row, of the rows' leading shape.
        module: the module of a role in that layer or in the trunk, for a function that needs its weights.
    """

    layer: int | None
    positions: Any
    module: Callable[[str], Any]


@frozen
class Derived:
    """A function of tensors, for one that the model computes and keeps nowhere. It is only read.

    ``function(*rows, place)`` gets ``[..., width]`` of each input and gives ``[..., width of the point]``. It is
    complete at the site of the last input.
    """

    inputs: tuple[Expression, ...] = field(converter=as_tuple)
    function: Callable[..., Any]


Expression = Read | Slice | Permute | Scale | Learned | Sum | Derived


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
    elif isinstance(expression, Derived):
        for part in expression.inputs:
            yield from leaves(part)
    else:
        yield from leaves(expression.of)


def derives(expression: Expression) -> bool:
    """Whether a :class:`Derived` is part of an expression, which then needs a :class:`Place` to be read."""
    if isinstance(expression, Read):
        return False
    if isinstance(expression, Sum):
        return derives(expression.first) or derives(expression.second)
    return True if isinstance(expression, Derived) else derives(expression.of)


def read_value(expression: Expression, leaf: Callable[[Read], Any], place: Place | None = None) -> Any:
    """The value of an expression, given each site's tensor (``[..., width]``). May be a view.

    Args:
        expression: what to read.
        leaf: the tensor of a site.
        place: where the rows stand; needed where the expression :func:`derives`.
    """
    if isinstance(expression, Read):
        return leaf(expression)
    if isinstance(expression, Sum):
        return read_value(expression.first, leaf, place) + read_value(expression.second, leaf, place)
    if isinstance(expression, Derived):
        if place is None:
            raise ValueError("a derived value is read where its rows stand, and never written through")
        return expression.function(*(read_value(part, leaf, place) for part in expression.inputs), place)
    inner = read_value(expression.of, leaf, place)
    if isinstance(expression, Scale):
        return inner * expression.factor
    if isinstance(expression, Learned):
        return expression.applied(inner)
    if isinstance(expression, Permute):
        return _permuted(inner, expression.shape, expression.order)
    return _flat(_part(inner, expression), inner.dim() - 1)


def write_value(expression: Expression, leaf: Callable[[Read], Any], old: Any, new: Any) -> Any:
    """What the last site's tensor must become so that the expression's value goes from ``old`` to ``new``.

    Where another term stands between, the *difference* is carried; where a constant or a weight does, entries that do
    not change stay. A write that changes nothing is then exactly nothing, whatever the rounding, and a zero through a
    constant is exactly zero.
    """
    if isinstance(expression, Read):
        return new
    if isinstance(expression, Scale):
        inner_old = read_value(expression.of, leaf)
        return write_value(expression.of, leaf, inner_old, inner_old.where(new == old, new / expression.factor))
    if isinstance(expression, Learned):
        inner_old = read_value(expression.of, leaf)
        inner_new = expression.undone(new).to(inner_old.dtype)
        return write_value(expression.of, leaf, inner_old, inner_old.where(new == old, inner_new))
    if isinstance(expression, Sum):
        second_old = read_value(expression.second, leaf)
        return write_value(expression.second, leaf, second_old, second_old + (new - old).to(second_old.dtype))
    if isinstance(expression, Derived):
        raise ValueError("a derived value is only read")
    inner_old = read_value(expression.of, leaf)
    if isinstance(expression, Permute):
        return write_value(expression.of, leaf, inner_old, _unpermuted(new, expression))
    inner_new = inner_old.clone()
    part = _part(inner_new, expression)
    part.copy_(new.reshape(part.shape))
    return write_value(expression.of, leaf, inner_old, inner_new)


def spread(expression: Expression, leaf: Callable[[Read], Any], change: Any) -> Any:
    """What to add to the last site's tensor so that the expression's value grows by ``change``."""
    if isinstance(expression, Read):
        return change
    if isinstance(expression, Scale):
        return spread(expression.of, leaf, change / expression.factor)
    if isinstance(expression, Learned):
        return spread(expression.of, leaf, change / getattr(expression.owner, expression.weight))
    if isinstance(expression, Sum):
        return spread(expression.second, leaf, change)
    if isinstance(expression, Derived):
        raise ValueError("a derived value is only read")
    if isinstance(expression, Permute):
        return spread(expression.of, leaf, _unpermuted(change, expression))
    whole = read_value(expression.of, leaf)
    inner = whole.new_zeros(whole.shape)
    part = _part(inner, expression)
    part.copy_(change.reshape(part.shape))
    return spread(expression.of, leaf, inner)


def _permuted(tensor: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    lead = tensor.dim() - 1
    whole = tensor.unflatten(-1, shape)
    return whole.permute(*range(lead), *(lead + axis for axis in order)).flatten(lead)


def _unpermuted(tensor: Any, expression: Permute) -> Any:
    shape = tuple(expression.shape[axis] for axis in expression.order)
    back = tuple(expression.order.index(axis) for axis in range(len(shape)))
    return _permuted(tensor, shape, back)


def _part(tensor: Any, piece: Slice) -> Any:
    if math.prod(piece.shape) != tensor.shape[-1]:
        raise ValueError(f"a fused tensor of width {tensor.shape[-1]} does not unflatten to {piece.shape}")
    rest = (slice(None),) * (len(piece.shape) - len(piece.index))
    return tensor.unflatten(-1, piece.shape)[(..., *piece.index, *rest)]


def _flat(tensor: Any, leading: int) -> Any:
    return tensor.flatten(leading) if tensor.dim() > leading + 1 else tensor
