"""Two owners of one name. Settled over all plugins at once, so that no order can matter.

Both plugins are refused, whole: half a plugin is nothing that anybody has tested. What is the core's
cannot be taken by anyone, and stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from interp_core._version import __version__
from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.collect import Collected
from interp_core.discovery import BLOCK_VARIABLE, CORE
from interp_core.points import GENERAL_POINTS
from interp_core.triage import PluginRecord, joined, off_switch, way_out
from interp_core.validation import meaning

__all__ = ["find_conflicts"]


def find_conflicts(records: Sequence[PluginRecord], collected: Mapping[int, Collected]) -> dict[int, str]:
    """The reason against every plugin that claims a name which is not its alone.

    Args:
        records: every installed plugin.
        collected: what each healthy one described, by its index in ``records``.

    Returns:
        By the same index, one sentence that names both owners and the way out.
    """
    reasons: defaultdict[int, list[str]] = defaultdict(list)
    for what, owners in _shared_names(collected):
        rivals = [records[index] for index in owners]
        origins = joined(rival.origin for rival in rivals)
        if len({(rival.distribution, rival.version) for rival in rivals}) < len(rivals):
            origins = joined(f"{rival.name!r} of {rival.origin}" for rival in rivals)
        for index in owners:
            reasons[index].append(f"{what} by {origins}, so none of them is used; {way_out(rivals, records)}")
    for index, found in collected.items():
        for what in _taken_from_core(found):
            switch = off_switch(records[index], records) or records[index].name
            reasons[index].append(
                f"{what} belongs to {CORE} {__version__} and {records[index].origin} cannot define it again; "
                f"rename it there, or switch the plugin off with {BLOCK_VARIABLE}={switch}"
            )
    return {index: _sentence(said) for index, said in reasons.items()}


def _sentence(said: list[str]) -> str:
    first = said[0][0].upper() + said[0][1:]
    return "; also, ".join([first, *said[1:]]) + "."


def _shared_names(collected: Mapping[int, Collected]) -> Iterator[tuple[str, list[int]]]:
    """Every name with more than one owner: the claim in words, and the owners."""
    names: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, found in collected.items():
        for kind, records in (
            ("backend", found.backends),
            ("architecture", found.architectures),
            ("capability", found.capabilities),
        ):
            for record in records:
                names[kind, record.name].append(index)
    for (kind, name), owners in names.items():
        if len(owners) > 1:
            yield f"the {kind} name {name!r} is claimed", owners
    for name, meanings in _points(collected).items():
        if len(set(meanings.values())) > 1:
            yield f"the point {name!r} is defined with different meanings", list(meanings)


def _points(collected: Mapping[int, Collected]) -> dict[str, dict[int, object]]:
    """What each plugin means by each point that it adds; a plugin agrees with itself."""
    points: defaultdict[str, dict[int, object]] = defaultdict(dict)
    for index, found in collected.items():
        for architecture in found.architectures:
            for point in architecture.points:
                points[point.name][index] = meaning(point)
    return points


def _taken_from_core(found: Collected) -> Iterator[str]:
    for row in found.capabilities:
        if row.name in CORE_CAPABILITIES:
            yield f"the capability {row.name!r}"
    for name in dict.fromkeys(point.name for a in found.architectures for point in a.points):
        if name in GENERAL_POINTS:
            yield f"the general point {name!r}"
