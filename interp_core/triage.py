"""What may be imported at all, and the record of each plugin; still from metadata alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from attrs import evolve, field, frozen

from interp_core.discovery import BLOCK_VARIABLE, PluginEntry, PluginFilter, names_of, normalised, scan
from interp_core.errors import PluginConflict, PluginUnavailable

__all__ = ["PluginRecord", "Status", "joined", "list_plugins", "off_switch", "triage", "way_out"]

Status = Literal["enabled", "active", "blocked", "conflict", "incompatible", "failed"]


@frozen(kw_only=True)
class PluginRecord:
    """One plugin, and what became of it.

    Attributes:
        name: the entry point's name.
        distribution: the distribution that it came from; its name again if it was given in code.
        version: that distribution's version; empty if it was given in code.
        requires_core: the versions of interp-core that it asks for; empty if it does not say.
        value: the object that the entry point names.
        status: ``"active"``, ``"blocked"`` (switched off), ``"conflict"`` (another plugin claims the same
            name), ``"incompatible"`` (needs another core) or ``"failed"`` (broken). ``"enabled"`` occurs
            only where nothing was imported: it would be loaded.
        reason: why it is not active, one sentence for people; empty if it is.
        error: the exception behind the reason; ``None`` if it is active, or switched off on purpose.
        backends: names of its backends, as far as they got to be known.
        architectures: names of its architectures, likewise.
        capabilities: names of its rows of capabilities, likewise.
    """

    name: str
    distribution: str
    version: str
    requires_core: str
    value: str
    status: Status
    reason: str = ""
    error: BaseException | None = field(default=None, eq=False)
    backends: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}".strip()


def list_plugins(environ: Mapping[str, str] | None = None) -> tuple[PluginRecord, ...]:
    """Every installed plugin, from metadata alone: nothing is imported, so nothing of it can fail.

    Args:
        environ: where the variables are read; ``None`` for the process's own.

    Returns:
        Records whose status is ``enabled``, ``blocked``, ``conflict`` or ``incompatible``.
    """
    if environ is None:
        import os

        environ = os.environ
    return triage(scan(), PluginFilter.from_environ(environ))


def triage(entries: Sequence[PluginEntry], rules: PluginFilter) -> tuple[PluginRecord, ...]:
    """One record for each entry, in the same order; only those that are ``enabled`` may be imported.

    A plugin that is switched off, or that this core cannot use, does not hold its name against others.
    """
    records = [_judged(entry, rules) for entry in entries]
    for name in {record.name for record in records}:
        rivals = [record for record in records if record.name == name and record.status == "enabled"]
        if len(rivals) < 2:
            continue
        origins = joined(record.origin for record in rivals)
        said = f"The plugin name {name!r} is declared by {origins}, so none of them is imported"
        reason = f"{said}; {way_out(rivals, records)}."
        for index, record in enumerate(records):
            if any(record is rival for rival in rivals):
                records[index] = evolve(record, status="conflict", reason=reason, error=PluginConflict(reason))
    return tuple(records)


def off_switch(record: PluginRecord, everyone: Iterable[PluginRecord]) -> str | None:
    """A name that switches off this plugin and no other, or ``None`` if there is none."""
    others = {name for other in everyone if other is not record for name in names_of(other)}
    for name in (record.name, record.distribution):
        if name and normalised(name) not in others:
            return name
    return None


def way_out(rivals: Iterable[PluginRecord], everyone: Sequence[PluginRecord]) -> str:
    """How to end a conflict between plugins."""
    switches = [switch for rival in rivals if (switch := off_switch(rival, everyone))]
    if not switches:
        return "uninstall all but one"
    listed = " or ".join(f"{BLOCK_VARIABLE}={switch}" for switch in switches)
    return f"switch off all but one, with {listed}"


def _judged(entry: PluginEntry, rules: PluginFilter) -> PluginRecord:
    record = PluginRecord(
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        requires_core=entry.requires_core,
        value=entry.value,
        status="enabled",
    )
    blocked = rules.blocks(entry)
    if blocked:
        return evolve(record, status="blocked", reason=blocked)
    if entry.problem:
        return evolve(record, status="incompatible", reason=entry.problem, error=PluginUnavailable(entry.problem))
    return record


def joined(origins: Iterable[str]) -> str:
    """Names as a list in a sentence."""
    *first, last = list(origins)
    return f"{', '.join(first)} and {last}" if first else last
