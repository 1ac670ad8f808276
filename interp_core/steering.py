"""From operations to validated writes, and the context that applies them to every call on a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from interp_core.address import Address, AddressPattern
from interp_core.converters import as_tuple
from interp_core.errors import AddressError, RequestError
from interp_core.operations import Ablate, Apply, Cap, Operation, Replace, Swap
from interp_core.requests import Where, Write
from interp_core.tokens import select_positions

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = ["Steering", "active_steering", "as_steering", "steer", "writes_for"]


@frozen(kw_only=True, eq=False)
class Steering:
    """Operations, checked against a model, and where they apply.

    Attributes:
        writes: one per operation and address, positions not yet resolved.
        positions: as the caller gave them; resolved per prompt.
        prompt: whether prompt positions are written.
        generated: whether generated positions are written.
    """

    writes: tuple[Write, ...] = field(converter=as_tuple)
    positions: Any = None
    prompt: bool = True
    generated: bool = True


# Keyed by the model's identity; a context variable, so that threads and tasks do not steer each other.
_ACTIVE: ContextVar[tuple[tuple[int, Steering], ...]] = ContextVar("interp_steering", default=())


@contextmanager
def steer(
    model: InterpModel,
    operations: Operation | Iterable[Operation],
    *,
    positions: Any = None,
    prompt: bool = True,
    generated: bool = True,
) -> Iterator[None]:
    """Steer every call on ``model`` inside the block; nested blocks compose, the outer one first.

    Args:
        model: the model.
        operations: one or more operations.
        positions: absolute positions, a slice, or ``"last"`` (of the prompt); ``None`` for all.
        prompt: whether prompt positions are written.
        generated: whether positions of generated tokens are written.

    Raises:
        AddressError: an operation names what does not exist.
        CapabilityUnsupported: an address cannot be written on this model.
        RequestError: a vector or a position is not valid.
    """
    steering = as_steering(model.profile, operations, positions=positions, prompt=prompt, generated=generated)
    token = _ACTIVE.set((*_ACTIVE.get(), (id(model), steering)))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_steering(model: InterpModel) -> tuple[Steering, ...]:
    """The steering of the ``steer`` blocks that surround this call, outermost first."""
    return tuple(s for owner, s in _ACTIVE.get() if owner == id(model))


def as_steering(
    profile: ModelProfile,
    operations: Steering | Operation | Iterable[Operation],
    *,
    positions: Any = None,
    prompt: bool = True,
    generated: bool = True,
) -> Steering:
    """Check operations against a model and make their vectors into tensors.

    Raises:
        AddressError, CapabilityUnsupported, RequestError: as :func:`steer`.
    """
    if isinstance(operations, Steering):
        return operations
    listed = [operations] if isinstance(operations, Operation) else operations
    if not isinstance(listed, Iterable):
        raise RequestError(f"steering takes operations such as Add(...), not {operations!r}")
    writes: list[Write] = []
    for operation in listed:
        if not isinstance(operation, Operation):
            raise RequestError(f"steering takes operations such as Add(...), not {operation!r}")
        for address in _addresses(profile, operation):
            writes.append(Write(operation=_checked(profile, operation.at(address), address), address=address))
    if not (prompt or generated):
        raise RequestError("steering with prompt=False and generated=False would write nowhere")
    return Steering(writes=writes, positions=positions, prompt=prompt, generated=generated)


def writes_for(steerings: Sequence[Steering], length: int) -> tuple[Write, ...]:
    """The writes of one request, with positions resolved for its prompt of ``length`` tokens."""
    found: list[Write] = []
    for steering in steerings:
        where = _where(steering, length)
        for write in steering.writes:
            if isinstance(write.operation, Replace) and write.operation.value.dim() == 2:
                _check_rows(write, where, length)
            found.append(evolve(write, where=where))
    return tuple(found)


def _where(steering: Steering, length: int) -> Where:
    positions = steering.positions
    if isinstance(positions, (str, slice)):
        chosen = frozenset(select_positions(positions, length) or ())
    elif positions is None:
        chosen = None
    else:
        # Absolute positions may lie beyond the prompt: they are then written when generation gets there.
        chosen = frozenset(select_positions(positions, 2**62) or ())
        if not steering.generated and chosen and min(chosen) >= length:
            raise RequestError(
                f"positions {sorted(chosen)} are beyond this prompt of {length} tokens, and generated=False"
            )
    return Where(positions=chosen, prompt=steering.prompt, generated=steering.generated)


def _check_rows(write: Write, where: Where, length: int) -> None:
    written = where.rows(0, length, length)
    count = len(range(*written.indices(length))) if isinstance(written, slice) else len(written)
    have = write.operation.value.shape[0]  # type: ignore[attr-defined]
    if have != count:
        raise RequestError(f"Replace at {write.address}: {have} rows for {count} written positions")


def _addresses(profile: ModelProfile, operation: Operation) -> tuple[Address, ...]:
    target = operation.address
    found = profile.addresses([target]) if isinstance(target, AddressPattern) else (profile.address(target),)
    for address in found:
        refused = profile.write_refusal(address)
        if refused is not None:
            raise refused
    return found


def _checked(profile: ModelProfile, operation: Operation, address: Address) -> Operation:
    if isinstance(operation, Apply):
        profile.require("apply")
        if not callable(operation.fn):
            raise RequestError(f"Apply at {address}: {operation.fn!r} is not callable")
        return operation
    if address.module_path is not None:
        raise AddressError(f"{address}: a module of the model itself has no declared shape; use Apply(address, fn)")
    for name in ("scale", "factor", "low", "high"):
        _check_number(operation, name, address)
    shape = profile.shape(address)
    changes = {}
    for name in type(operation).tensor_fields:
        what = f"{type(operation).__name__} at {address}: {name}"
        value = getattr(operation, name)
        if value is not None:
            changes[name] = _vector(value, shape, what, operation)
        elif not isinstance(operation, Ablate):
            raise RequestError(f"{what} is missing")
    checked = evolve(operation, **changes)
    _check_directions(checked, address)
    return checked


def _check_number(operation: Operation, name: str, address: Address) -> None:
    value = getattr(operation, name, None)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{type(operation).__name__} at {address}: {name} is a finite number, not {value!r}")


def _check_directions(operation: Operation, address: Address) -> None:
    name = type(operation).__name__
    if isinstance(operation, Cap):
        if operation.low is None and operation.high is None:
            raise RequestError(f"Cap at {address} needs low, high or both")
        if operation.low is not None and operation.high is not None and operation.low > operation.high:
            raise RequestError(f"Cap at {address}: low={operation.low} is above high={operation.high}")
    if name in ("Scale", "Cap", "NormScaledAdd", "Ablate", "Swap"):
        for field_name in type(operation).tensor_fields:
            vector = getattr(operation, field_name)
            if vector is not None and float(vector.norm()) == 0.0:
                raise RequestError(f"{name} at {address}: {field_name} is zero, so it has no direction")
    if isinstance(operation, Swap):
        a, b = operation.first, operation.second
        if float((a @ b).abs() / (a.norm() * b.norm())) > 1 - 1e-6:
            raise RequestError(f"Swap at {address}: the two directions are parallel")


def _vector(value: Any, shape: tuple[int, ...], what: str, operation: Operation) -> Any:
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{what} is not a tensor or numbers: {error}") from error
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise RequestError(f"{what} is not made of real numbers but of {tensor.dtype}")
    if not tensor.is_floating_point():
        tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise RequestError(f"{what} holds values that are not finite (NaN or infinity)")
    return _fitted(tensor, shape, what, rows=isinstance(operation, Replace))


def _fitted(tensor: Any, shape: tuple[int, ...], what: str, *, rows: bool) -> Any:
    width = math.prod(shape)
    given = tuple(tensor.shape)
    if given in (shape, (width,)):
        return tensor.reshape(width)
    if rows and len(given) >= 1 and given[1:] in (shape, (width,)):
        return tensor.reshape(given[0], width)
    flat = "" if shape == (width,) else f" or [{width}]"
    per_row = f", or [positions, {', '.join(map(str, shape)) or '1'}]" if rows else ""
    raise RequestError(f"{what} has shape {list(given)}; this address takes {list(shape)}{flat}{per_row}")
