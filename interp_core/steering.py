"""From operations to validated writes, and the context that applies them to every call on a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from interp_core.address import Address, AddressPattern
from interp_core.converters import as_tuple
from interp_core.errors import RequestError
from interp_core.operands import ready
from interp_core.operations import Operation, Replace
from interp_core.requests import Where, Write
from interp_core.tokens import UNKNOWN, select_positions

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
            writes.append(Write(operation=ready(profile, operation.at(address), address), address=address))
    if not (prompt or generated):
        raise RequestError("steering with prompt=False and generated=False would write nowhere")
    _check_positions(positions, prompt)
    return Steering(writes=writes, positions=positions, prompt=prompt, generated=generated)


def writes_for(steerings: Sequence[Steering], length: int) -> tuple[Write, ...]:
    """The writes of one request, with positions resolved for its prompt of ``length`` tokens.

    Raises:
        RequestError: positions select nothing of this prompt, or rows do not match the written positions.
    """
    found: list[Write] = []
    for steering in steerings:
        order, where = _where(steering, length)
        for write in steering.writes:
            if isinstance(write.operation, Replace) and write.operation.value.dim() == 2:
                found.append(_row_by_row(write, where, order, length))
            else:
                found.append(evolve(write, where=where))
    return tuple(found)


def _check_positions(positions: Any, prompt: bool) -> None:
    """What can be said of positions before a prompt is known."""
    chosen = select_positions(positions, UNKNOWN)
    if chosen is None:
        return
    if not chosen and not isinstance(positions, slice):
        raise RequestError("positions is empty, so steering would write nowhere")
    if not prompt and isinstance(positions, (str, slice)):
        raise RequestError(f"positions={positions!r} are positions of the prompt, and prompt=False writes none of them")


def _where(steering: Steering, length: int) -> tuple[tuple[int, ...] | None, Where]:
    """Positions in the caller's order, and as a rule for the forward."""
    positions = steering.positions
    # Absolute positions may lie beyond the prompt: they are then written when generation gets there.
    within = length if isinstance(positions, (str, slice)) else UNKNOWN
    order = select_positions(positions, within)
    if order is not None:
        if not order:
            raise RequestError(f"positions={positions!r} select nothing of this prompt of {length} tokens")
        if not steering.generated and min(order) >= length:
            raise RequestError(
                f"positions {sorted(order)} are beyond this prompt of {length} tokens, and generated=False"
            )
    chosen = None if order is None else frozenset(order)
    return order, Where(positions=chosen, prompt=steering.prompt, generated=steering.generated)


def _row_by_row(write: Write, where: Where, order: tuple[int, ...] | None, length: int) -> Write:
    """A ``Replace`` with one row per position: rows follow the positions as the caller listed them."""
    operation: Any = write.operation
    written = list(range(length)) if order is None else list(order)
    if len(set(written)) < len(written) or max(written) >= length or not where.prompt:
        raise RequestError(
            f"Replace at {write.address}: rows are for prompt positions, each named once; give one vector to write "
            "positions that are generated"
        )
    if len(operation.value) != len(written):
        raise RequestError(
            f"Replace at {write.address}: {len(operation.value)} rows for {len(written)} written positions"
        )
    sorted_rows = operation.value[sorted(range(len(written)), key=written.__getitem__)]
    return evolve(write, operation=evolve(operation, value=sorted_rows), where=evolve(where, generated=False))


def _addresses(profile: ModelProfile, operation: Operation) -> tuple[Address, ...]:
    target = operation.address
    found = profile.addresses([target]) if isinstance(target, AddressPattern) else (profile.address(target),)
    for address in found:
        refused = profile.write_refusal(address)
        if refused is not None:
            raise refused
    return found
