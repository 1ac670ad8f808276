"""Operations as data: one fixed arithmetic that a compiled or replayed graph can run, whatever the operation.

A graph that is replayed runs no Python, so it cannot call :func:`interp_core.arithmetic.apply_operation`. Here each
operation becomes a row of numbers and up to five vectors, and :func:`run_programs` computes, per row ``x``,

    y = x + mask * ((keep - 1) * x) + coefficient * direction + constant
    coefficient = c1 (x.u) + c2 (x.w) + cn |mask * x| + cc (clamp(x.u, low, high) - x.u)

with every vector zero outside the slice that a coordinate names. A program of zeros changes nothing. That it equals
``apply_operation`` for every operation is tested.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from interp_core import operations as ops
from interp_core.converters import as_tuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NUMBERS", "VECTORS", "Program", "program_of", "run_programs"]

VECTORS: Final = ("mask", "u", "w", "direction", "constant")
"""The vectors of a program, in the order of the last axis of an index."""

NUMBERS: Final = ("drop", "c1", "c2", "cn", "cc", "low", "high")
"""The numbers of a program; ``drop`` is ``1 - keep``, so that zeros mean nothing is changed."""


@frozen(eq=False)
class Program:
    """One operation on one slice of a point.

    Attributes:
        vectors: by name, ``[width]`` float32; a missing one is zero. ``constant`` may be ``[rows, width]``.
        numbers: by the order of ``NUMBERS``.
    """

    vectors: dict[str, Tensor]
    numbers: tuple[float, ...] = field(converter=as_tuple)


def program_of(operation: ops.Operation, place: Tensor, width: int) -> Program:
    """The program of an operation whose vectors are tensors already.

    Args:
        operation: any operation of the core but ``Apply``.
        place: which entries of the point's flat row the operation's own vectors fill, int64.
        width: of the flat row.

    Raises:
        TypeError: the operation cannot be data.
    """
    import torch

    mask = torch.zeros(width)
    mask[place] = 1.0
    vectors, numbers = _PROGRAMS[type(operation)](operation) if type(operation) in _PROGRAMS else _refused(operation)
    # A value per row stays one vector per row.
    spread = {name: _spread(vector, place, width) for name, vector in vectors.items()}
    return Program({"mask": mask, **spread}, tuple(float(numbers.get(name, 0.0)) for name in NUMBERS))


def run_programs(x: Tensor, bank: Tensor, index: Tensor, numbers: Tensor) -> Tensor:
    """The rows ``x`` after one program each.

    Args:
        x: ``[rows, width]``.
        bank: ``[vectors, width]`` float32, row 0 of zeros.
        index: ``[rows, 5]`` rows of the bank, by the order of ``VECTORS``.
        numbers: ``[rows, 7]`` float32, by the order of ``NUMBERS``.

    Returns:
        A new tensor of ``x``'s shape and dtype.
    """
    drop, c1, c2, cn, cc, low, high = numbers[:, :, None].unbind(1)
    wide = x.float()
    masked = wide * bank[index[:, 0]]
    on_u = (masked * bank[index[:, 1]]).sum(-1, keepdim=True)
    on_w = (masked * bank[index[:, 2]]).sum(-1, keepdim=True)
    norm = (masked * masked).sum(-1, keepdim=True).sqrt()
    capped = on_u.maximum(low).minimum(high) - on_u
    coefficient = c1 * on_u + c2 * on_w + cn * norm + cc * capped
    out = wide - drop * masked + coefficient * bank[index[:, 3]] + bank[index[:, 4]]
    return out.to(x.dtype)


def _spread(vector: Tensor, place: Tensor, width: int) -> Tensor:
    import torch

    flat = vector.detach().float().reshape(-1, place.numel())
    out = torch.zeros(len(flat), width)
    out[:, place] = flat
    return out[0] if len(flat) == 1 else out


def _unit(vector: Tensor) -> Tensor:
    wide = vector.detach().float().reshape(-1)
    unit: Tensor = wide / wide.norm()
    return unit


Parts = tuple[dict[str, Any], dict[str, float]]


def _add(op: Any) -> Parts:
    return {"constant": op.scale * op.vector.float()}, {}


def _scale(op: Any) -> Parts:
    unit = _unit(op.vector)
    return {"u": unit, "direction": unit}, {"c1": op.factor - 1.0}


def _cap(op: Any) -> Parts:
    unit = _unit(op.vector)
    low = -math.inf if op.low is None else op.low
    high = math.inf if op.high is None else op.high
    return {"u": unit, "direction": unit}, {"cc": 1.0, "low": low, "high": high}


def _norm_scaled_add(op: Any) -> Parts:
    return {"direction": _unit(op.vector)}, {"cn": op.scale}


def _ablate(op: Any) -> Parts:
    return ({}, {"drop": 1.0}) if op.vector is None else _scale(ops.Scale(op.address, op.vector, 0.0))


def _swap(op: Any) -> Parts:
    a, b = _unit(op.first), _unit(op.second)
    overlap = float(a @ b)
    # (along_b - along_a) of the least-squares expansion in both, as a multiple of x.b - x.a.
    step = (1.0 + overlap) / (1.0 - overlap * overlap)
    return {"u": a, "w": b, "direction": a - b}, {"c1": -step, "c2": step}


def _replace(op: Any) -> Parts:
    return {"constant": op.value.float()}, {"drop": 1.0}


def _refused(operation: ops.Operation) -> Parts:
    raise TypeError(f"{type(operation).__name__} cannot be data for a compiled graph")


_PROGRAMS: Final[dict[type[ops.Operation], Any]] = {
    ops.Add: _add,
    ops.Scale: _scale,
    ops.Cap: _cap,
    ops.NormScaledAdd: _norm_scaled_add,
    ops.Ablate: _ablate,
    ops.Swap: _swap,
    ops.Replace: _replace,
}
