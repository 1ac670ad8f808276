"""The static half of the kit: what can be said of a plugin without a model, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import evolve

from interp_core.collect import CONTAINED, Collected, InvalidPlugin, collect, import_plugin
from interp_core.conflicts import find_conflicts
from interp_core.discovery import CORE, PluginEntry, PluginFilter, normalised, one_line, scan
from interp_core.errors import PluginUnavailable, unknown_name
from interp_core.testing import records
from interp_core.testing.findings import RULES, Finding
from interp_core.testing.isolated import ask
from interp_core.testing.reasons import unexplained
from interp_core.testing.targets import target_faults
from interp_core.triage import PluginRecord, triage

__all__ = ["check_plugin", "installed_entry"]


def check_plugin(name_or_entry: str | PluginEntry) -> list[Finding]:
    """Check one plugin against every static rule. No model is needed, and no engine is imported here.

    Args:
        name_or_entry: an installed plugin, by the name of its entry point or of its distribution; or an entry
            that stands for one that is not installed, whose module can be imported.

    Returns:
        One finding per rule, in the order of :data:`RULES`.

    Raises:
        PluginUnavailable: no installed plugin is called so; the message lists those that are.
    """
    entry = installed_entry(name_or_entry) if isinstance(name_or_entry, str) else name_or_entry
    found = {"core-range": _core_range(entry), **_imports(entry)}
    # What cannot be imported without a trace is not imported into the caller's process.
    if not found["entry-resolves"] and not found["import-clean"]:
        found |= _described(entry)
    # What could not be asked because something before it failed has not been kept either.
    unasked = ["it could not be asked, because a rule before it is not kept"]
    findings = []
    for rule in RULES:
        notes = found.get(rule, unasked)
        wrong = [note for note in notes if not note.startswith(_SKIPPED)]
        findings.append(Finding(rule, not wrong, "; ".join(wrong or [n.removeprefix(_SKIPPED) for n in notes])))
    return findings


_SKIPPED = "skipped: "


def installed_entry(name: str) -> PluginEntry:
    """The installed plugin of that name, or of the distribution of that name.

    Raises:
        PluginUnavailable: there is none, or the name fits several.
    """
    entries = scan()
    wanted = normalised(name)
    for attribute in ("name", "distribution"):
        found = [entry for entry in entries if normalised(getattr(entry, attribute)) == wanted]
        if len(found) == 1:
            return found[0]
        if found:
            raise PluginUnavailable(f"{name!r} fits several installed plugins: {', '.join(map(_called, found))}")
    listed = ", ".join(map(_called, entries)) or "none"
    said = unknown_name("plugin", name, [entry.name for entry in entries])
    raise PluginUnavailable(f"{said} Installed: {listed}.")


def _called(entry: PluginEntry) -> str:
    return f"{entry.name} ({entry.distribution} {entry.version})".replace(" )", ")")


def _core_range(entry: PluginEntry) -> list[str]:
    from packaging.specifiers import SpecifierSet

    if entry.problem:
        return [entry.problem]
    operators = {one.operator for one in SpecifierSet(entry.requires_core)}
    if operators & {"==", "~=", "==="} or (operators & {">", ">="} and operators & {"<", "<="}):
        return []
    said = f"requires {CORE}{entry.requires_core}" if operators else f"does not require {CORE}"
    return [f"the distribution {entry.distribution} {said}; write a range, such as {CORE}>=0.1,<0.2"]


def _imports(entry: PluginEntry) -> dict[str, list[str]]:
    answer = ask("import", entry.value)
    if "broken" in answer:
        fault = [f"importing {entry.value!r}: {answer['broken']}"]
        return {"entry-resolves": fault}
    if answer["error"]:
        return {"entry-resolves": [f"importing {entry.value!r} failed: {answer['error'].strip()}"]}
    light = [f"importing {entry.value!r} imports {', '.join(answer['engines'])}"] if answer["engines"] else []
    late = [name for name in answer["engines_of_hooks"] if name not in answer["engines"]]
    light += [f"calling its hooks or probes imports {', '.join(late)}"] if late else []
    clean = [f"importing {entry.value!r} changes {change}" for change in answer["changes"]]
    return {"entry-resolves": [], "import-light": light, "import-clean": clean}


def _described(entry: PluginEntry) -> dict[str, list[str]]:
    """The rules about what its hooks return, with the plugin imported here."""
    try:
        plugin = import_plugin(entry.name, entry.value)
    except CONTAINED as error:
        return {"hooks-known": [f"importing {entry.value!r} here failed: {one_line(error)}"]}
    first = collect(plugin, entry.name, entry.distribution)
    if first.error is not None:
        return _failed(first)
    second = collect(plugin, entry.name, entry.distribution)
    everyone = _everyone_else(entry)
    rows = {row.name: row for _, found in everyone for row in found.capabilities}
    faults, skipped = target_faults(first)
    return {
        "hooks-known": [],
        "records-valid": [],
        "records-stable": list(records.stable(first, second)),
        "records-picklable": list(records.picklable(first)),
        "targets-resolve": [*faults, *(_SKIPPED + note for note in skipped)],
        "names-unique": _clashes(entry, first, everyone),
        **_looked_at({"points-well-formed": records.points, "options-documented": records.options}, first),
        **_looked_at({"reasons-given": unexplained}, first),
        "capabilities-known": list(records.capabilities(first, rows)),
    }


def _looked_at(rules: Mapping[str, Callable[[Collected], Iterable[str]]], found: Collected) -> dict[str, list[str]]:
    return {rule: list(look(found)) for rule, look in rules.items()}


def _failed(found: Collected) -> dict[str, list[str]]:
    """Which rule a failure to collect belongs to: what hooks there are, or what they return."""
    reason = found.reason or "it failed"
    returned = isinstance(found.error, InvalidPlugin) and any(
        mark in reason for mark in ("is not valid", "twice", "returned", "two meanings")
    )
    if returned or (reason.startswith("Its hook interp_") and "raised" in reason):
        return {"hooks-known": [], "records-valid": [reason]}
    return {"hooks-known": [reason]}


def _everyone_else(entry: PluginEntry) -> list[tuple[PluginRecord, Collected]]:
    """Every other installed plugin that loads, with what it describes."""
    others = [e for e in scan() if (e.name, normalised(e.distribution)) != (entry.name, normalised(entry.distribution))]
    found = []
    for other, record in zip(others, triage(others, PluginFilter()), strict=True):
        if record.status != "enabled":
            continue
        try:
            described = collect(import_plugin(other.name, other.value), other.name, other.distribution)
        except CONTAINED:
            continue
        if described.error is None:
            found.append((evolve(record, status="active"), described))
    return found


def _clashes(entry: PluginEntry, own: Collected, everyone: list[tuple[PluginRecord, Collected]]) -> list[str]:
    others: list[Any] = [record for record, _ in everyone]
    (mine,) = triage([evolve(entry, problem=None)], PluginFilter())
    reasons = find_conflicts([mine, *others], {0: own, **{i + 1: found for i, (_, found) in enumerate(everyone)}})
    same = [record.origin for record in others if record.name == entry.name]
    clashes = [f"{', '.join(same)} has an entry point of the same name, {entry.name!r}"] if same else []
    return [*clashes, *([reasons[0]] if 0 in reasons else [])]
