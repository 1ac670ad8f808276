"""The rules about records as such: repeated calls, pickling, names, points, capabilities, options."""

from __future__ import annotations

import keyword
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, Final

from interp_core.architecture import Architecture
from interp_core.backend import BackendSpec
from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.collect import Collected
from interp_core.discovery import one_line
from interp_core.keywords import OptionSpec
from interp_core.points import GENERAL_POINTS
from interp_core.testing.same import differing

__all__ = ["AXES", "capabilities", "options", "picklable", "points", "stable"]

AXES: Final = frozenset(
    "d_model vocab streams query key heads kv_heads head_dim v_head_dim d_mlp experts top_k".split()
)
"""The axes whose sizes :meth:`ModelFacts.axis_size` knows."""

_COMMON: Final = ("dtype", "device", "trust_remote_code", "backend", "host")


def every(found: Collected) -> Iterator[tuple[str, Any]]:
    """Each record with what to call it."""
    listed: list[Any] = [*found.backends, *found.architectures, *found.capabilities]
    for record in listed:
        yield f"{type(record).__name__} {record.name!r}", record


def stable(first: Collected, second: Collected) -> Iterator[str]:
    """What a second call of the hooks gives otherwise than the first."""
    if second.error is not None:
        yield f"the second call fails: {second.reason}"
        return
    ones, others = list(every(first)), list(every(second))
    if [name for name, _ in ones] != [name for name, _ in others]:
        yield f"the first call gives {[name for name, _ in ones]}, the second {[name for name, _ in others]}"
        return
    for (name, one), (_, other) in zip(ones, others, strict=True):
        where = differing(one, other)
        if where:
            yield f"{name}: {where} differs between two calls"


def picklable(found: Collected) -> Iterator[str]:
    """Records that do not come back from pickling as they were."""
    for name, record in every(found):
        try:
            back = pickle.loads(pickle.dumps(record))
        except Exception as error:  # noqa: BLE001 - whatever pickling of a stranger's object raises
            yield f"{name} cannot be pickled ({one_line(error)}); give functions by name, at the top of a module"
            continue
        where = differing(record, back)
        if where:
            yield f"{name}: {where} comes back from pickling as something else"


def points(found: Collected) -> Iterator[str]:
    """Points that nobody defines, and added ones that say too little."""
    for spec in found.backends:
        yield from _unknown(f"BackendSpec {spec.name!r}: points", spec.points, set(GENERAL_POINTS))
    for architecture in found.architectures:
        what = f"Architecture {architecture.name!r}"
        own = {point.name for point in architecture.points}
        for point in architecture.points:
            strange = [axis for axis in point.axes if axis not in AXES]
            if strange:
                yield f"{what}: the point {point.name!r} has the unknown axis {strange[0]!r}; known: {sorted(AXES)}"
            if not isinstance(point.definition, str) or not point.definition.strip():
                yield f"{what}: the point {point.name!r} has no definition"
            if point.name in GENERAL_POINTS:
                yield f"{what}: the point {point.name!r} is a general one; describe its support instead"
        for backend, table in architecture.support.items():
            yield from _unknown(f"{what}: support[{backend!r}]", table, own | set(GENERAL_POINTS))
        yield from _unknown(f"{what}: refused", architecture.refused, set(GENERAL_POINTS))
        yield from _unknown(f"{what}: stream_points", dict.fromkeys(architecture.stream_points), set(GENERAL_POINTS))


def _unknown(where: str, table: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for name in table:
        if name not in known:
            yield f"{where} names {name!r}, which is no point"


def capabilities(found: Collected, others: Mapping[str, Any]) -> Iterator[str]:
    """Capabilities that no table has. ``others``: rows of other installed plugins."""
    known = {*CORE_CAPABILITIES, *others, *(row.name for row in found.capabilities)}
    for spec in found.backends:
        for field, names in (("capabilities", spec.capabilities), ("lacks", spec.lacks)):
            for name in sorted(names):
                if name not in known:
                    yield f"BackendSpec {spec.name!r}: {field} names {name!r}, which is no row of the table"
        for name in sorted(set(spec.lacks) & spec.capabilities):
            yield f"BackendSpec {spec.name!r} both serves and lacks {name!r}"


def options(found: Collected) -> Iterator[str]:
    """Options that a user could not use, or would not understand."""
    for spec in found.backends:
        yield from _options(f"BackendSpec {spec.name!r}", spec)
    for architecture in found.architectures:
        yield from _options(f"Architecture {architecture.name!r}", architecture)


def _options(what: str, record: BackendSpec | Architecture) -> Iterator[str]:
    tables = {"": record.options} if isinstance(record, BackendSpec) else record.options
    for backend, listed in tables.items():
        where = f"{what}{f', on {backend!r}' if backend else ''}"
        for option in listed:
            yield from (f"{where}: the option {option.name!r} {fault}" for fault in _option(option))
        names = [option.name for option in listed]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{where}: the option {name!r} is described twice"


def _option(option: OptionSpec) -> Iterator[str]:
    if not option.name.isidentifier() or keyword.iskeyword(option.name):
        yield "cannot be written as a keyword"
    if option.name in _COMMON:
        yield "is one that load_model takes everywhere"
    if not isinstance(option.help, str) or not option.help.strip():
        yield "has no help text"
    if option.default is not None and not isinstance(option.default, option.types):
        yield f"has the default {option.default!r}, which is none of its types"
    if option.choices and option.default is not None and option.default not in option.choices:
        yield f"has the default {option.default!r}, which is none of its choices"
