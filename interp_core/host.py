"""The host of plugins: finds them, loads them one by one, and keeps each one's failure its own."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from attrs import define, evolve, field, frozen

from interp_core._version import __version__
from interp_core.architecture import Architecture
from interp_core.backend import BackendSpec
from interp_core.capabilities import CORE_CAPABILITIES, Capability
from interp_core.collect import CONTAINED, Collected, collect, import_plugin
from interp_core.conflicts import find_conflicts
from interp_core.discovery import BLOCK_VARIABLE, CORE, PluginEntry, PluginFilter, names_of, normalised, scan
from interp_core.errors import InterpError, PluginConflict, PluginUnavailable, nearest
from interp_core.missing import missing_backend
from interp_core.triage import PluginRecord, list_plugins, off_switch, triage

__all__ = ["PluginHost", "PluginRecord", "PluginWarning", "default_host", "list_plugins"]

STRICT_VARIABLE: Final = "INTERP_STRICT_PLUGINS"


class PluginWarning(UserWarning):
    """A plugin that is installed but cannot be used, in one line."""


@frozen
class _Source:
    """A declared plugin, and how to get its object."""

    entry: PluginEntry
    load: Callable[[], Any]


@frozen
class _Loaded:
    """Everything that loading finds out, made whole before anybody sees it."""

    records: tuple[PluginRecord, ...]
    backends: Mapping[str, BackendSpec]
    architectures: Mapping[str, Architecture]
    capabilities: Mapping[str, Capability]
    warnings: tuple[str, ...]
    strict_failure: tuple[str, BaseException | None] | None


@define(eq=False, init=False)
class PluginHost:
    """The plugins of one process, or of one test.

    Loading happens once, on :meth:`load` or when something is first asked; several threads may ask.
    A plugin that cannot be used is recorded with its reason and takes nothing else down.

    Args:
        discover: whether installed distributions are scanned.
        plugins: plugin objects, or ``(name, object)`` pairs, beside the installed ones. The name also
            stands for their distribution.
        environ: where ``INTERP_PLUGINS``, ``INTERP_DISABLE_PLUGINS`` and ``INTERP_STRICT_PLUGINS`` are
            read; ``None`` for the process's own environment, when loading.
    """

    _discover: bool
    _given: tuple[tuple[str, Any], ...] = field(repr=False)
    _environ: Mapping[str, str] | None = field(repr=False)
    _lock: Any = field(repr=False)
    _loading: bool = field(repr=False)
    _loaded: _Loaded | None = field(repr=False)

    def __init__(
        self, *, discover: bool = True, plugins: Iterable[Any] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self._discover = discover
        self._given = tuple(_named(plugin) for plugin in plugins)
        self._environ = environ
        # Re-entrant, so that a plugin that asks the host while it is being loaded gets an error, not a deadlock.
        self._lock = threading.RLock()
        self._loading = False
        self._loaded = None

    def load(self) -> None:
        """Find, import and merge plugins, once; later calls do nothing.

        Warns:
            PluginWarning: one line for each plugin that is neither active nor switched off.

        Raises:
            PluginUnavailable: ``INTERP_STRICT_PLUGINS=1`` and a plugin cannot be used; its own failure
                is the cause. Every later call raises it again.
        """
        self._usable()

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """Every plugin, active or not, by name. A listing always works: strictness does not make it raise."""
        return self._state(3).records

    @property
    def backends(self) -> Mapping[str, BackendSpec]:
        """The backends of active plugins, by name."""
        return self._usable().backends

    @property
    def architectures(self) -> Mapping[str, Architecture]:
        """The architectures of active plugins, by name."""
        return self._usable().architectures

    @property
    def capabilities(self) -> Mapping[str, Capability]:
        """The merged table of capabilities: the core's rows first, then those of active plugins."""
        return self._usable().capabilities

    def explain_missing_backend(self, name: str) -> InterpError:
        """The error to raise for a backend that :attr:`backends` lacks.

        Returns:
            :class:`PluginUnavailable`, caused by the stored failure, if an installed plugin that is not
            active owns it or most likely does; else :class:`BackendUnavailable`, with the likely name or
            the distribution to install.
        """
        state = self._state(3)
        return missing_backend(name, state.records, state.backends)

    def _usable(self) -> _Loaded:
        state = self._state(4)
        if state.strict_failure is not None:
            message, cause = state.strict_failure
            raise PluginUnavailable(message) from cause
        return state

    def _state(self, level: int) -> _Loaded:
        """What loading found; ``level`` is how far up the stack is who asked, for the warnings."""
        loaded = self._loaded
        if loaded is not None:
            return loaded
        with self._lock:
            if self._loaded is not None:
                return self._loaded
            if self._loading:
                raise PluginUnavailable("the plugins are still being loaded; a plugin must not ask the host for others")
            self._loading = True
            try:
                loaded = self._find_all()
                self._loaded = loaded
            finally:
                self._loading = False
        # Only now: a filter that turns warnings into errors must not undo what was found.
        for line in loaded.warnings:
            warnings.warn(line, PluginWarning, stacklevel=level)
        return loaded

    def _find_all(self) -> _Loaded:
        environ = os.environ if self._environ is None else self._environ
        rules = PluginFilter.from_environ(environ)
        sources = [_Source(_entry_for(name, plugin), partial(_itself, plugin)) for name, plugin in self._given]
        if self._discover:
            sources += [_Source(entry, partial(import_plugin, entry.name, entry.value)) for entry in scan()]
        sources.sort(key=lambda source: (source.entry.name, normalised(source.entry.distribution)))
        entries = [source.entry for source in sources]
        records = list(triage(entries, rules))
        collected: dict[int, Collected] = {}
        for index, record in enumerate(records):
            if record.status == "enabled":
                found = _load_one(record, sources[index].load)
                records[index] = _described(record, found)
                if found.error is None:
                    collected[index] = found
        for index, reason in find_conflicts(records, collected).items():
            records[index] = evolve(records[index], status="conflict", reason=reason, error=PluginConflict(reason))
            del collected[index]
        # Names are checked against what is installed; a host made of objects alone has nothing installed.
        unknown = _unknown_names(rules, entries) if self._discover else []
        return _merged(records, collected.values(), unknown, strict=_is_on(environ.get(STRICT_VARIABLE, "")))


_default: PluginHost | None = None
_default_lock = threading.Lock()


def default_host() -> PluginHost:
    """The host of this process: all installed plugins, found when first asked."""
    global _default  # noqa: PLW0603 - one per process is what it is for
    with _default_lock:
        if _default is None:
            _default = PluginHost()
        return _default


def _named(given: Any) -> tuple[str, Any]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        return given
    # Looked up without evaluating anything: a plugin's own __getattr__ may do what it likes, or raise.
    name = given.__name__ if inspect.ismodule(given) or inspect.isclass(given) else type(given).__name__
    return name.rpartition(".")[2], given


def _entry_for(name: str, plugin: Any) -> PluginEntry:
    if inspect.ismodule(plugin):
        value = plugin.__name__
    else:
        kind = plugin if inspect.isclass(plugin) else type(plugin)
        value = f"{kind.__module__}:{kind.__qualname__}"
    return PluginEntry(name=name, value=value, distribution=name, version="")


def _itself(plugin: Any) -> Any:
    return plugin


def _load_one(record: PluginRecord, load: Callable[[], Any]) -> Collected:
    try:
        plugin = load()
    except CONTAINED as error:
        return Collected().fail(f"Importing {record.value!r}", error)
    return collect(plugin, record.name, record.distribution)


def _described(record: PluginRecord, found: Collected) -> PluginRecord:
    return evolve(
        record,
        status="active" if found.error is None else "failed",
        reason=found.reason,
        error=found.error,
        backends=tuple(spec.name for spec in found.backends),
        architectures=tuple(architecture.name for architecture in found.architectures),
        capabilities=tuple(row.name for row in found.capabilities),
    )


def _merged(
    records: Sequence[PluginRecord], active: Iterable[Collected], unknown: Sequence[str], *, strict: bool
) -> _Loaded:
    backends: dict[str, BackendSpec] = {}
    architectures: dict[str, Architecture] = {}
    capabilities = dict(CORE_CAPABILITIES)
    for found in active:
        backends |= {spec.name: spec for spec in found.backends}
        architectures |= {architecture.name: architecture for architecture in found.architectures}
        capabilities |= {row.name: row for row in found.capabilities}
    broken = [record for record in records if record.status not in ("active", "blocked")]
    lines = [_line(record, records) for record in broken]
    failure = None
    if strict and broken:
        failure, lines = ("; ".join(lines), broken[0].error), []
    return _Loaded(
        records=tuple(records),
        backends=MappingProxyType(backends),
        architectures=MappingProxyType(architectures),
        capabilities=MappingProxyType(capabilities),
        warnings=(*lines, *unknown),
        strict_failure=failure,
    )


def _line(record: PluginRecord, records: Sequence[PluginRecord]) -> str:
    """One line on a plugin that cannot be used: which, whose, why, and how to have peace."""
    switch = off_switch(record, records)
    silence = f"with {BLOCK_VARIABLE}={switch}" if switch else f"by uninstalling {record.origin}"
    which = f"plugin {record.name!r} of {record.origin} (with {CORE} {__version__}) is not used"
    kind = "" if record.error is None else f" [{type(record.error).__name__}]"
    return " ".join(f"{which}, {record.status}{kind}: {record.reason} Silence this {silence}.".split())


def _unknown_names(rules: PluginFilter, entries: Sequence[PluginEntry]) -> list[str]:
    known = sorted({name for entry in entries for name in names_of(entry)})
    lines = []
    for variable, name in rules.unmatched(entries):
        guess = nearest(name, known)
        hint = f" Did you mean {guess!r}?" if guess else ""
        lines.append(f"{variable} names {name!r}, which no installed plugin is called.{hint}")
    return lines


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")
