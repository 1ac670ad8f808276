"""Whether gradients can flow through a model's forward, and what would open it."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = ["GradSupport"]


@frozen(kw_only=True)
class GradSupport:
    """A verdict on gradients, answered from configuration and load options.

    Attributes:
        through_forward: whether gradients flow from outputs to captured tensors and parameters.
        blockers: what stands in the way, one sentence each.
        caveats: what holds only in part, one sentence each.
        remedy: the call that would open it; empty where nothing would.
    """

    through_forward: bool
    blockers: tuple[str, ...] = field(default=(), converter=as_tuple)
    caveats: tuple[str, ...] = field(default=(), converter=as_tuple)
    remedy: str = ""

    def describe(self) -> dict[str, Any]:
        """The verdict as a JSON-able record with a sentence for people."""
        if self.through_forward:
            summary = "Gradients flow through the forward."
        else:
            summary = "No gradients through the forward: " + ("; ".join(self.blockers) or "not supported") + "."
        return {
            "through_forward": self.through_forward,
            "blockers": list(self.blockers),
            "caveats": list(self.caveats),
            "remedy": self.remedy,
            "summary": " ".join([summary, *self.caveats, f"Remedy: {self.remedy}." if self.remedy else ""]).strip(),
        }
