"""What the numbers of a harvest depend on, beside its texts: as a record that two runs can be compared by."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import frozen

from interp_core._version import __version__
from interp_core.address import Address
from interp_core.casting import read_dtype
from interp_core.errors import RequestError
from interp_core.sampling import read_count
from interp_core.scalars import whole_number
from interp_core.steering import Steering
from interp_core.tokens import UNKNOWN, select_positions

if TYPE_CHECKING:
    import torch

    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = ["Plan", "read_plan"]

_SHARD_BYTES: Final = 2**29
_SHARD_TEXTS: Final = 1024
_USUAL_LENGTH: Final = 2048


@frozen(kw_only=True, eq=False)
class Plan:
    """A harvest's settings, checked.

    Attributes:
        addresses: what is captured.
        positions: as the caller gave them.
        batch_size: texts of one forward.
        shard_size: texts of one file.
        max_length: tokens after which a text is cut, or ``None``.
        dtype: dtype on disk, or ``None`` for the model's.
        record: all that a later run has to have the same, for JSON.
    """

    addresses: tuple[Address, ...]
    positions: Any
    batch_size: int
    shard_size: int
    max_length: int | None
    dtype: torch.dtype | None
    record: Mapping[str, Any]


def read_plan(
    model: InterpModel,
    addresses: tuple[Address, ...],
    steerings: Sequence[Steering],
    *,
    positions: Any,
    batch_size: Any,
    shard_size: Any,
    max_length: Any,
    dtype: Any,
) -> Plan:
    """Check a harvest's settings.

    Raises:
        RequestError: there is no point, or a number, position or dtype is not valid.
    """
    if not addresses:
        raise RequestError("points is empty: there is nothing to harvest")
    batch_size = read_count("batch_size", batch_size)
    max_length = None if max_length is None else read_count("max_length", max_length)
    limit = model.facts.max_positions
    if limit is not None and max_length is not None and max_length > limit:
        raise RequestError(f"max_length={max_length} is more than this model takes ({limit})")
    select_positions(positions, UNKNOWN)
    if shard_size is None:
        shard_size = _default_shard_size(model.profile, addresses, batch_size, max_length)
    shard_size = read_count("shard_size", shard_size)
    kept = None if dtype is None else read_dtype(dtype)
    record = {
        "model": model.model_id,
        "backend": model.backend,
        "options": {name: _plain(value) for name, value in model.profile.options.items()},
        "points": [str(address) for address in addresses],
        "positions": _positions(positions),
        "batch_size": batch_size,
        "shard_size": shard_size,
        "max_length": max_length,
        "dtype": None if kept is None else str(kept).removeprefix("torch."),
        "steering": [_steering(steering) for steering in steerings],
        "versions": _versions(model.profile),
    }
    return Plan(
        addresses=addresses,
        positions=positions,
        batch_size=batch_size,
        shard_size=shard_size,
        max_length=max_length,
        dtype=kept,
        record=record,
    )


def _default_shard_size(
    profile: ModelProfile, addresses: Sequence[Address], batch_size: int, max_length: int | None
) -> int:
    """Texts per shard: as many whole batches as stay within 512 MiB of float32, at most about 1,024 texts.

    It is reckoned with texts of ``max_length`` tokens; without, of the model's limit or 2,048, whichever is less.
    """
    length = max_length or min(profile.facts.max_positions or _USUAL_LENGTH, _USUAL_LENGTH)
    text = sum(4 * length * _width(profile, address, length) for address in addresses)
    batches = min(_SHARD_BYTES // (text * batch_size), _SHARD_TEXTS // batch_size)
    return batch_size * max(1, batches)


def _width(profile: ModelProfile, address: Address, length: int) -> int:
    """Numbers per row; of a module of the model's own, whose shape nobody knows, as many as the residual has."""
    if address.module_path is not None:
        return profile.facts.d_model
    # Query and key depend on the text and are 0: a row has one number per key.
    sizes = [size for size in profile.shape(address) if size]
    pairwise = not profile.specs[address.name].positional
    return max(1, math.prod(sizes) * (length if pairwise else 1))


def _positions(positions: Any) -> Any:
    if isinstance(positions, slice):
        return {"slice": [whole_number(part) for part in (positions.start, positions.stop, positions.step)]}
    chosen = select_positions(positions, UNKNOWN) if not isinstance(positions, str) else positions
    return list(chosen) if isinstance(chosen, tuple) else chosen


def _steering(steering: Steering) -> dict[str, Any]:
    """Operations by what they are and a digest of their vectors. A callable has none: what it does is checked by
    computing some of the harvest again."""
    return {
        "operations": [
            {"kind": type(write.operation).__name__, "address": str(write.address), "values": _values(write.operation)}
            for write in steering.writes
        ],
        "positions": _positions(steering.positions),
        "prompt": steering.prompt,
        "generated": steering.generated,
    }


def _values(operation: Any) -> dict[str, Any]:
    named = {one.name: getattr(operation, one.name) for one in attrs.fields(type(operation)) if one.name != "address"}
    return {name: _plain(value) for name, value in named.items()}


def _plain(value: Any) -> Any:
    """A value for JSON: itself where it is plain, a digest of a tensor, the type of anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "detach"):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {digest}"
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return type(value).__name__


def _versions(profile: ModelProfile) -> dict[str, str]:
    """Versions of the core, of whatever serves the model, and of what that needs beyond the core: the engine."""
    from importlib_metadata import PackageNotFoundError, version

    owners = {profile.spec.owner, "" if profile.architecture is None else profile.architecture.owner} - {""}
    engine = {name for owner in owners for name in _needs(owner)} - _needs("interp-core")
    found = {"interp-core": __version__}
    for name in sorted((owners | engine) - {"interp-core"}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _needs(distribution: str) -> set[str]:
    """Names of the distributions that one cannot do without; none where it is not installed as one."""
    from importlib_metadata import PackageNotFoundError, requires
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        return set()
    return {one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
