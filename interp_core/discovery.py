"""Which plugins are installed, read from metadata alone: nothing of a plugin is imported here.

This is what ``interp plugins`` stands on, so it has to work when every plugin, or the metadata of any
distribution on the path, is broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from attrs import frozen

from interp_core._version import __version__

__all__ = [
    "ALLOW_VARIABLE",
    "BLOCK_VARIABLE",
    "CORE",
    "GROUP",
    "PluginEntry",
    "PluginFilter",
    "names_of",
    "normalised",
    "one_line",
    "scan",
]

GROUP: Final = "interp.plugins"
"""The entry-point group that plugins declare."""

CORE: Final = "interp-core"
"""The distribution that a plugin requires to say which cores it works with."""

ALLOW_VARIABLE: Final = "INTERP_PLUGINS"
BLOCK_VARIABLE: Final = "INTERP_DISABLE_PLUGINS"

_LONGEST: Final = 400  # characters of a stranger's message that still make one line


@frozen
class PluginEntry:
    """One declared plugin.

    Attributes:
        name: the entry point's name.
        value: the object that it names, ``"package.module"`` or ``"package.module:object"``.
        distribution: the distribution that declares it.
        version: that distribution's version.
        requires_core: the versions of interp-core that it asks for, such as ``"<0.2,>=0.1"``; empty if
            it does not say.
        problem: why it cannot be used, from metadata alone; ``None`` if nothing is wrong there.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires_core: str = ""
    problem: str | None = None


@frozen
class PluginFilter:
    """Which plugins the environment lets in.

    A name in either list matches an entry point's name or a distribution's name; case, ``-``, ``_`` and
    ``.`` make no difference, as in package names.

    Attributes:
        allow: the only names that may be imported; ``None`` for all, empty for none.
        block: names that are never imported.
    """

    allow: frozenset[str] | None = None
    block: frozenset[str] = frozenset()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginFilter:
        """Read ``INTERP_PLUGINS`` (unset: all; empty: none) and ``INTERP_DISABLE_PLUGINS``."""
        allow = environ.get(ALLOW_VARIABLE)
        return cls(None if allow is None else _names(allow), _names(environ.get(BLOCK_VARIABLE, "")))

    def blocks(self, entry: PluginEntry) -> str | None:
        """Why ``entry`` must not be imported, in one sentence, or ``None`` if it may be."""
        names = names_of(entry)
        if self.block & names:
            return f"Switched off by {BLOCK_VARIABLE}."
        if self.allow is not None and not self.allow & names:
            return f"Not in the allow list {ALLOW_VARIABLE}."
        return None

    def unmatched(self, entries: Iterable[PluginEntry]) -> Iterator[tuple[str, str]]:
        """Variable and name of every listed name that no installed plugin has."""
        known = {name for entry in entries for name in names_of(entry)}
        for variable, listed in ((ALLOW_VARIABLE, self.allow or frozenset()), (BLOCK_VARIABLE, self.block)):
            for name in sorted(listed - known):
                yield variable, name


def names_of(entry: Any) -> frozenset[str]:
    """The normalised names that an entry, or a record of one, answers to in the two lists."""
    return frozenset(normalised(name) for name in (entry.name, entry.distribution) if name)


def normalised(name: str) -> str:
    """A name as package indexes compare names."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(name.strip())


def one_line(error: BaseException) -> str:
    """The type and text of an exception on one line, also if its own ``__str__`` raises."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 - a stranger's __str__
        text = f"(its text cannot be had: {type(broken).__name__})"
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def scan(core_version: str = __version__) -> tuple[PluginEntry, ...]:
    """Every installed plugin, sorted by name, then by distribution; duplicates of a name are all there.

    Args:
        core_version: the core that each plugin's requirement is checked against.
    """
    import importlib_metadata

    entries: list[PluginEntry] = []
    seen: set[str] = set()
    for found in importlib_metadata.distributions():
        if not _declares_group(found):
            continue
        name, _ = _identity(found)
        if normalised(name) in seen:
            continue
        seen.add(normalised(name))
        # An older copy later on the path must not speak for the one that would be imported.
        entries.extend(_entries(_first_on_path(name) or found, core_version))
    return tuple(sorted(entries, key=lambda entry: (entry.name, normalised(entry.distribution), entry.value)))


def _names(listed: str) -> frozenset[str]:
    return frozenset(normalised(name) for name in listed.split(",") if name.strip())


def _declares_group(found: Any) -> bool:
    # The text is searched before it is parsed: a malformed file of a stranger is none of our business,
    # and most distributions are done with after this line, their METADATA unread.
    try:
        text = found.read_text("entry_points.txt") or ""
    except Exception:  # noqa: BLE001 - see above
        return False
    return any(line.strip().strip("[]").strip() == GROUP for line in text.splitlines() if line.lstrip().startswith("["))


def _first_on_path(name: str) -> Any:
    import importlib_metadata

    try:
        return importlib_metadata.distribution(name)
    except Exception:  # noqa: BLE001 - the caller has another copy
        return None


def _identity(found: Any) -> tuple[str, str]:
    """Name and version, from METADATA or, if that is unreadable, from the name of its folder."""
    with suppress(Exception):  # what is wrong with it is told by _core_requirement
        metadata = found.metadata
        if metadata["Name"]:
            return str(metadata["Name"]), str(metadata["Version"] or "")
    folder = str(found).replace("\\", "/").rpartition("/")[2]
    name, _, version = folder.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")
    return name, version


def _entries(found: Any, core_version: str) -> Iterator[PluginEntry]:
    distribution, version = _identity(found)
    requires, problem = _core_requirement(found, core_version)
    try:
        points = [point for point in found.entry_points if point.group == GROUP]
    except Exception as error:  # noqa: BLE001 - becomes the reason
        problem = f"Its entry_points.txt cannot be read ({one_line(error)})."
        yield PluginEntry(distribution, "", distribution, version, requires, problem)
        return
    for point in points:
        yield PluginEntry(point.name, point.value, distribution, version, requires, problem)


def _core_requirement(found: Any, core_version: str) -> tuple[str, str | None]:
    """The specifier for interp-core, and what is wrong with it."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet

    try:
        if not found.metadata["Name"]:
            return "", "Its METADATA is missing or has no name."
        lines = found.requires or []
    except Exception as error:  # noqa: BLE001 - becomes the reason
        return "", f"Its METADATA cannot be read ({one_line(error)})."
    wanted = SpecifierSet()
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            if normalised(line).startswith(CORE):
                return "", f"Its requirement {line!r} cannot be read."
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if normalised(requirement.name) == CORE and applies:
            wanted &= requirement.specifier
    # Prereleases count: who runs one asked for it, and a plugin cannot know of it.
    if wanted.contains(core_version, prereleases=True):
        return str(wanted), None
    return str(wanted), f"It requires {CORE}{wanted}, and {core_version} is installed."
