"""What a record that crosses a plugin's boundary must be, checked once, when plugins load.

Records are written by strangers and carry few validators of their own. A value of the wrong type would
otherwise come to light in the middle of somebody's question about a model, with no owner named. They are
typed ``Any`` here: their annotations are promises, and this is where promises are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from interp_core.address import parse_address
from interp_core.architecture import Architecture, Claim
from interp_core.errors import AddressError
from interp_core.keywords import OptionSpec
from interp_core.points import PointSpec, PointSupport

__all__ = ["check_architecture", "check_backend", "check_capability", "check_point_meanings", "meaning"]

RESERVED_BACKENDS: Final = frozenset({"auto"})
"""Words that ``load_model(..., backend=...)`` takes for something else."""


def meaning(point: PointSpec) -> tuple[Any, ...]:
    """What two points of one name must agree on to be one point."""
    return point.scope, point.axes, point.integer


def check_backend(spec: Any) -> str | None:
    """What is wrong with a backend's description, or ``None``."""
    if spec.name in RESERVED_BACKENDS:
        return f"the name {spec.name!r} is the core's own"
    return _first_wrong(
        _texts(spec, "name", "summary"),
        None if _is_target(spec.factory) else f"factory is {spec.factory!r}, not 'package.module:callable'",
        None if _is_target(spec.demo_model, optional=True) else "demo_model is not 'package.module:callable' or None",
        None if _is_support(spec.points) else "points is not a mapping of names to PointSupport",
        None if _is_mapping(spec.lacks, str) else "lacks is not a mapping of names to reasons",
        None if callable(spec.probe) else "probe is not callable",
        None if _all(spec.capabilities, str) else "capabilities is not a set of names",
        None if _all(spec.options, OptionSpec) else "options are not OptionSpecs",
        None if spec.rank is None or isinstance(spec.rank, int) else f"rank is {spec.rank!r}, not an integer or None",
        _callables(spec, "grad", "static", "limits"),
    )


def check_architecture(architecture: Any) -> str | None:
    """What is wrong with an architecture's description, or ``None``."""
    support = architecture.support
    return _first_wrong(
        _texts(architecture, "name", "summary"),
        None if isinstance(architecture.claim, Claim) else "claim is not a Claim",
        None if _all(architecture.points, PointSpec) else "points are not PointSpecs",
        *(_wrong_point(point) for point in architecture.points if isinstance(point, PointSpec)),
        None
        if _is_mapping(support, Mapping) and all(_is_support(table) for table in support.values())
        else "support is not a mapping of backend names to mappings of names to PointSupport",
        None if _is_mapping(architecture.refused, str) else "refused is not a mapping of names to what to call instead",
        None if _all(architecture.stream_points, str) else "stream_points is not a set of names",
        None if _is_mapping(architecture.bindings, str) else "bindings is not a mapping of backend names to targets",
        *(
            None if _is_target(target) else f"bindings[{name!r}] is {target!r}, not 'package.module:name'"
            for name, target in (architecture.bindings.items() if isinstance(architecture.bindings, Mapping) else ())
        ),
        *(
            None if _is_target(target) else f"models[{name!r}] is {target!r}, not 'package.module:Class'"
            for name, target in (architecture.models.items() if isinstance(architecture.models, Mapping) else ())
        ),
        None if not architecture.config or _is_target(architecture.config) else "config is not 'package.module:Class'",
        None
        if isinstance(architecture.options, Mapping)
        and all(_all(options, OptionSpec) for options in architecture.options.values())
        else "options is not a mapping of backend names to OptionSpecs",
        _callables(architecture, "facts", "residual_basis"),
    )


def check_capability(row: Any) -> str | None:
    """What is wrong with a row of capabilities, or ``None``."""
    return _texts(row, "name", "what", "why", "instead")


def check_point_meanings(architectures: Iterable[Architecture]) -> str | None:
    """Whether one plugin gives one point name two meanings."""
    known: dict[str, PointSpec] = {}
    for architecture in architectures:
        for point in architecture.points:
            if meaning(known.setdefault(point.name, point)) != meaning(point):
                return f"the point {point.name!r} has two meanings"
    return None


def _wrong_point(point: Any) -> str | None:
    try:
        plain = isinstance(point.name, str) and "." not in point.name and parse_address(point.name).name == point.name
    except AddressError:
        plain = False
    if not plain:
        return f"{point.name!r} cannot be the name of a point: lower case letters, digits and underscores"
    if point.scope not in ("trunk", "layer"):
        return f"the point {point.name!r} has the scope {point.scope!r}, not 'trunk' or 'layer'"
    return None if point.axes and _all(point.axes, str) else f"the point {point.name!r} has no axes"


def _first_wrong(*findings: str | None) -> str | None:
    return next((finding for finding in findings if finding), None)


def _texts(record: Any, *fields: str) -> str | None:
    for name in fields:
        value = getattr(record, name)
        if not isinstance(value, str) or not value.strip():
            return f"{name} is {value!r}, not a text"
    if record.name != "".join(record.name.split()):
        return f"the name {record.name!r} has a space in it"
    return None


def _callables(record: Any, *fields: str) -> str | None:
    wrong = [name for name in fields if getattr(record, name) is not None and not callable(getattr(record, name))]
    return f"{wrong[0]} is not callable" if wrong else None


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _is_mapping(value: Any, kind: type) -> bool:
    return isinstance(value, Mapping) and _all(value, str) and _all(value.values(), kind)


def _is_support(value: Any) -> bool:
    return _is_mapping(value, PointSupport)


def _is_target(value: Any, *, optional: bool = False) -> bool:
    if value is None:
        return optional
    module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(module and name)
