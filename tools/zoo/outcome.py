"""What the run says of one architecture: a record that crosses processes and becomes a row of the page."""

from __future__ import annotations

from typing import Final

from attrs import evolve, field, frozen

__all__ = ["ABSENT", "FAILED", "KINDS", "PROVEN", "UNCHECKED", "UNSERVED", "Outcome"]

PROVEN: Final = "P"
FAILED: Final = "F"
UNCHECKED: Final = "?"
ABSENT: Final = "-"
UNSERVED: Final = "x"

KINDS: Final = {
    "proven": "proven: every point that is served, on every layer",
    "not proven": "not proven: some point is served, and nothing pins it down",
    "failed": "failed",
    "error": "error: something was raised",
    "unknown": "unknown: the block structure is not known, so every point is refused",
    "refused": "refused as a whole, with a reason",
    "not built": "not built: no tiny model can be made of it, or it cannot run on text",
}


@frozen(kw_only=True)
class Outcome:
    """One architecture.

    Attributes:
        name: its name in the zoo.
        kind: one of :data:`KINDS`.
        marks: per point one letter, where it holds for every layer, or one per layer: see the constants here.
        reasons: why points are not there: reason to points, with layers in brackets where not on all; or why
            there is nothing to say of any point.
        problems: what failed, each as a text for whoever mends it.
        doubts: what is served and not proven, and what verification hints at.
    """

    name: str
    kind: str
    marks: dict[str, str] = field(factory=dict)
    reasons: dict[str, list[str]] = field(factory=dict)
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is proven, and its blocks are: a trunk whose blocks have no one tensor proves little."""
        return self.kind == "proven" and self.marks.get("resid_post") == PROVEN

    def bare(self) -> Outcome:
        """What the page says of it."""
        return evolve(self, problems=(), doubts=())
