"""The rules of the static half, each in one sentence, and what is found about one of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

__all__ = ["RULES", "Finding"]

RULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "core-range": "The distribution's metadata says which cores it works with, from a lower to an upper bound.",
        "entry-resolves": "The entry point names an object that can be imported.",
        "import-light": "Importing the entry point, and asking its hooks and probes, imports no engine.",
        "import-clean": "Importing the entry point changes nothing in the process and writes nothing.",
        "hooks-known": "It implements at least one hook, no unknown one, with the arguments of the specification.",
        "records-valid": "Every record that a hook returns is of the right kind, with fields of the right kinds.",
        "records-stable": "A hook that is called again returns equal records.",
        "records-picklable": "Every record survives pickling, as an engine's worker processes need it to.",
        "targets-resolve": "Every 'package.module:name' string leads to an object of the right kind.",
        "names-unique": "No name is one of the core's, or of another installed plugin.",
        "points-well-formed": "Every point named is known, and every added one has known axes and a definition.",
        "capabilities-known": "Every capability that a backend serves or lacks is a row of the table.",
        "reasons-given": "Everything that is not served says why, and what to call instead.",
        "options-documented": "Every load option has a usable name, a help text, and a default that it would accept.",
    }
)
"""The static rules, by id, in the order of checking."""


@frozen
class Finding:
    """What became of one rule.

    Attributes:
        rule: the rule's id, a key of :data:`RULES`.
        ok: whether the plugin keeps it.
        message: what is wrong; for a rule that is kept, empty, or what could not be looked at and why.
    """

    rule: str
    ok: bool
    message: str = ""
