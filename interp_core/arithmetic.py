"""The arithmetic of each operation, once, in torch; every backend's hooks call these.

All functions take rows ``x`` of shape ``[rows, width]`` and vectors of shape ``[width]`` and return a
new tensor of ``x``'s shape and dtype; nothing is changed in place. Projections are computed in float32
at least, because a half-precision dot product over thousands of channels loses the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interp_core import operations as ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_operation"]


def apply_operation(operation: ops.Operation, x: Tensor) -> Tensor:
    """The rows ``x`` (``[rows, width]``) after ``operation``, whose vectors are tensors already."""
    for kind in type(operation).__mro__:
        if kind in _ARITHMETIC:
            return _ARITHMETIC[kind](operation, x)
    raise TypeError(f"no arithmetic for the operation {type(operation).__name__}")


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _unit(vector: Tensor, x: Tensor) -> Tensor:
    v = vector.to(device=x.device, dtype=x.dtype)
    unit: Tensor = v / v.norm()
    return unit


def _add(op: Any, x: Tensor) -> Tensor:
    step: Tensor = (op.scale * op.vector).to(device=x.device, dtype=x.dtype)
    return x + step


def _scale(op: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    unit = _unit(op.vector, wide)
    along = (wide @ unit)[:, None] * unit
    out: Tensor = wide + (op.factor - 1.0) * along
    return out.to(x.dtype)


def _cap(op: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    unit = _unit(op.vector, wide)
    along = wide @ unit
    change = along.clamp(min=op.low, max=op.high) - along
    return (wide + change[:, None] * unit).to(x.dtype)


def _norm_scaled_add(op: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    out: Tensor = wide + op.scale * wide.norm(dim=-1, keepdim=True) * _unit(op.vector, wide)
    return out.to(x.dtype)


def _ablate(op: Any, x: Tensor) -> Tensor:
    if op.vector is None:
        return x.new_zeros(x.shape)
    return _scale(ops.Scale(op.address, op.vector, 0.0), x)


def _swap(op: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    a, b = _unit(op.first, wide), _unit(op.second, wide)
    # Directions need not be orthogonal: the components are those of the least-squares expansion in both.
    overlap = a @ b
    on_a, on_b = wide @ a, wide @ b
    scale = 1.0 - overlap * overlap
    along_a, along_b = (on_a - overlap * on_b) / scale, (on_b - overlap * on_a) / scale
    return (wide + (along_b - along_a)[:, None] * (a - b)).to(x.dtype)


def _replace(op: Any, x: Tensor) -> Tensor:
    value = op.value.to(device=x.device, dtype=x.dtype)
    out: Tensor = value.expand(x.shape)
    return out.clone()


def _apply(op: Any, x: Tensor) -> Tensor:
    result: Tensor = op.fn(x)
    return result


_ARITHMETIC: dict[type[ops.Operation], Callable[[Any, Tensor], Tensor]] = {
    ops.Add: _add,
    ops.Scale: _scale,
    ops.Cap: _cap,
    ops.NormScaledAdd: _norm_scaled_add,
    ops.Ablate: _ablate,
    ops.Swap: _swap,
    ops.Replace: _replace,
    ops.Apply: _apply,
}
