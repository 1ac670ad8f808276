"""Operations made ready: their numbers checked against the address they write, their vectors made into tensors.

Vectors become float32 (float64 stays). Directions are brought to unit length here, in float64, so that
neither a huge nor a tiny one loses its direction to an overflow later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import evolve

from interp_core.address import Address
from interp_core.errors import AddressError, RequestError
from interp_core.operations import Ablate, Add, Apply, Cap, NormScaledAdd, Operation, Replace, Scale, Swap
from interp_core.scalars import real_number

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.profile import ModelProfile

__all__ = ["ready"]

_NUMBERS: Final = ("scale", "factor", "low", "high")
_DIRECTIONAL: Final = (Scale, Cap, NormScaledAdd, Ablate, Swap)


def ready(profile: ModelProfile, operation: Operation, address: Address) -> Operation:
    """The operation with its numbers checked and its vectors as flat tensors.

    Raises:
        AddressError: a module path with an operation that needs a declared shape.
        CapabilityUnsupported: a callable, on a backend that cannot serve one.
        RequestError: a number or a vector is not valid.
    """
    what = f"{type(operation).__name__} at {address}"
    if isinstance(operation, Apply):
        profile.require("apply")
        if not callable(operation.fn):
            raise RequestError(f"{what}: {operation.fn!r} is not callable")
        return operation
    if address.module_path is not None:
        raise AddressError(f"{address}: a module of the model itself has no declared shape; use Apply(address, fn)")
    if address.name in profile.specs and not profile.specs[address.name].positional:
        return _matrix(operation, address, profile.shape(address), what)
    changes: dict[str, Any] = {}
    for name in _NUMBERS:
        value = getattr(operation, name, None)
        if value is None:
            continue
        changes[name] = real_number(value)
        if changes[name] is None:
            raise RequestError(f"{what}: {name} is a finite number, not {value!r}")
    shape = profile.shape(address)
    for name in type(operation).tensor_fields:
        value = getattr(operation, name)
        if value is not None:
            changes[name] = _vector(value, shape, f"{what}: {name}", rows=isinstance(operation, Replace))
        elif not isinstance(operation, Ablate):
            raise RequestError(f"{what}: {name} is missing")
    return _checked(evolve(operation, **changes), what)


def _matrix(operation: Operation, address: Address, shape: tuple[int, ...], what: str) -> Operation:
    """An operation on a matrix over positions, whose size is the prompt's: as rows, one per query.

    Raises:
        RequestError: an operation with vectors, which have no meaning there, or a matrix of other axes.
    """
    if isinstance(operation, Ablate) and operation.vector is None:
        return operation
    if not isinstance(operation, Replace):
        raise RequestError(
            f"{what}: a matrix over positions takes Replace(address, matrix), Ablate(address) for zeros, or "
            "Apply(address, fn) with a function of rows [queries, ..., keys]; vectors have no meaning there"
        )
    tensor = _numbers(operation.value, f"{what}: value")
    if tensor.dim() != len(shape) or tuple(tensor.shape[:-2]) != shape[:-2]:
        heads = "".join(f"{size}, " for size in shape[:-2])
        raise RequestError(f"{what}: value has shape {list(tensor.shape)}; this address takes [{heads}queries, keys]")
    return evolve(operation, value=tensor.movedim(-2, 0).flatten(1))


def _checked(operation: Any, what: str) -> Operation:
    if isinstance(operation, Cap):
        if operation.low is None and operation.high is None:
            raise RequestError(f"{what} needs low, high or both")
        if operation.low is not None and operation.high is not None and operation.low > operation.high:
            raise RequestError(f"{what}: low={operation.low} is above high={operation.high}")
    if isinstance(operation, _DIRECTIONAL):
        given: dict[str, Any] = {name: getattr(operation, name) for name in type(operation).tensor_fields}
        units: dict[str, Any] = {name: _unit(v, f"{what}: {name}") for name, v in given.items() if v is not None}
        operation = attrs.evolve(operation, **units)
    if isinstance(operation, Swap) and float((operation.first.double() @ operation.second.double()).abs()) > 1 - 1e-6:
        raise RequestError(f"{what}: the two directions are parallel")
    if isinstance(operation, Add):
        _finite((operation.scale * operation.vector).float(), f"{what}: scale times vector, in float32,")
    done: Operation = operation
    return done


def _unit(vector: Tensor, what: str) -> Tensor:
    wide = vector.double()
    largest = wide.abs().max()
    if float(largest) == 0.0:
        raise RequestError(f"{what} is zero, so it has no direction")
    wide = wide / largest
    unit: Tensor = (wide / wide.norm()).to(vector.dtype)
    return unit


def _vector(value: Any, shape: tuple[int, ...], what: str, *, rows: bool) -> Tensor:
    return _fitted(_numbers(value, what), shape, what, rows=rows)


def _numbers(value: Any, what: str) -> Tensor:
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{what} is not a tensor or numbers: {error}") from error
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise RequestError(f"{what} is not made of real numbers but of {tensor.dtype}")
    _finite(tensor, what)
    # Half-precision products and norms lose what float32 keeps.
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _finite(tensor: Tensor, what: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise RequestError(f"{what} holds values that are not finite (NaN or infinity)")


def _fitted(tensor: Tensor, shape: tuple[int, ...], what: str, *, rows: bool) -> Tensor:
    width = math.prod(shape)
    given = tuple(tensor.shape)
    if given in (shape, (width,)):
        return tensor.reshape(width)
    if rows and len(given) >= 1 and given[1:] in (shape, (width,)):
        return tensor.reshape(given[0], width)
    flat = "" if shape == (width,) else f" or [{width}]"
    per_row = f", or [positions, {', '.join(map(str, shape)) or '1'}]" if rows else ""
    raise RequestError(f"{what} has shape {list(given)}; this address takes {list(shape)}{flat}{per_row}")
