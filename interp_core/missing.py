"""Why a backend is not there: not installed, switched off, or installed and broken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from interp_core.discovery import names_of, normalised
from interp_core.errors import BackendUnavailable, InterpError, PluginUnavailable, nearest, unknown_name
from interp_core.triage import PluginRecord

__all__ = ["missing_backend"]

_NAME = re.compile(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*")
_PREFIX = "interp-"


def missing_backend(name: str, records: Sequence[PluginRecord], known: Iterable[str]) -> InterpError:
    """The error for a backend that no active plugin has.

    Args:
        name: the backend that was asked for.
        records: every installed plugin.
        known: the backends that can be had.

    Returns:
        ``PluginUnavailable``, with the stored failure as its cause, if a plugin that is not active owns
        the name or most likely does; else ``BackendUnavailable``.
    """
    idle = [record for record in records if record.status != "active"]
    owner = next((record for record in idle if name in record.backends), None)
    if owner is not None:
        return _unavailable(name, owner, "belongs")
    known = sorted(known)
    asked = normalised(name).removeprefix(_PREFIX) if _NAME.fullmatch(name) else ""
    guess = nearest(name, [*known, *(backend for record in idle for backend in record.backends)])
    owner = _named_for(asked, idle) or (None if guess else _family_of(asked, idle))
    if owner is not None:
        return _unavailable(name, owner, "most likely belongs")
    if guess is not None and guess not in known:
        hidden = next(record for record in idle if guess in record.backends)
        return BackendUnavailable(f"unknown backend {name!r}. Did you mean {guess!r}? {_state(hidden, guess)}")
    if guess is not None or not asked:
        return BackendUnavailable(unknown_name("backend", name, known))
    return BackendUnavailable(_not_installed(name, asked, known, idle))


def _unavailable(name: str, owner: PluginRecord, belongs: str) -> PluginUnavailable:
    error = PluginUnavailable(f"{_state(owner, name, belongs)} Run 'interp plugins' to see all plugins.")
    error.__cause__ = owner.error
    return error


def _state(owner: PluginRecord, backend: str, belongs: str = "belongs") -> str:
    state = {"blocked": "is switched off", "failed": "failed to load"}.get(owner.status, "cannot be used")
    return (
        f"The backend {backend!r} {belongs} to the plugin {owner.name!r} ({owner.origin}), "
        f"which is installed but {state}. {owner.reason}"
    )


def _named_for(asked: str, idle: Iterable[PluginRecord]) -> PluginRecord | None:
    """The plugin that has the backend's own name, or whose distribution does."""
    names = {asked, _PREFIX + asked} if asked else set()
    return next((record for record in idle if names_of(record) & names), None)


def _family_of(asked: str, idle: Sequence[PluginRecord]) -> PluginRecord | None:
    """The plugin that is named for the backend's family, or has the backend's name as a part of its own."""
    owner = _named_for(asked.partition("-")[0], idle)
    if owner is not None or not asked:
        return owner
    return next((record for record in idle if f"-{asked}-" in f"-{normalised(record.name)}-"), None)


def _not_installed(name: str, asked: str, known: Iterable[str], idle: Sequence[PluginRecord]) -> str:
    distribution = _PREFIX + asked.partition("-")[0]
    said = (
        f"the backend {name!r} is not installed: no plugin here brings it. Install the distribution that does, "
        f"by its usual name {distribution!r} (pip install {distribution}). Installed: {', '.join(known) or 'none'}."
    )
    silent = [f"{record.name} ({record.origin}, {record.status})" for record in idle if not record.backends]
    if silent:
        # What they bring is not known, so it may be this.
        said += f" These installed plugins are not active, and one of them may bring it: {'; '.join(silent)}."
    return said
