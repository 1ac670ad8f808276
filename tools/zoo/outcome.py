"""What the run says of one architecture: a record that crosses processes and becomes a row of the page."""

from __future__ import annotations

from typing import Final

from attrs import field, frozen

__all__ = ["ABSENT", "FAILED", "PROVEN", "UNCHECKED", "UNSERVED", "Outcome"]

PROVEN: Final = "P"
FAILED: Final = "F"
UNCHECKED: Final = "?"
ABSENT: Final = "-"
UNSERVED: Final = "x"


@frozen(kw_only=True)
class Outcome:
    """One architecture.

    Attributes:
        name: its name in the zoo.
        kind: ``proven`` (every served point, on every layer), ``not proven`` (some served point has no
            identity), ``failed``, ``unknown`` (the block structure is not known, so layer points are refused),
            ``refused`` (no decoder, with the reason), ``error`` (something was raised), or ``not built``.
        marks: per point one letter per layer, or one for a point of the trunk: see the constants here.
        reasons: why points are not there: reason to points, with layers in brackets where not on all.
        problems: what failed, each as a text for whoever mends it.
    """

    name: str
    kind: str
    marks: dict[str, str] = field(factory=dict)
    reasons: dict[str, list[str]] = field(factory=dict)
    problems: tuple[str, ...] = ()
