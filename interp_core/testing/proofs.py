"""Which points the identities pin down, and which are declared and not proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from interp_core.checks import Check
from interp_core.converters import as_tuple
from interp_core.testing.served import Subject
from interp_core.verdicts import UNCHECKED
from interp_core.verify import examine

__all__ = ["Proof", "prove"]


@frozen(kw_only=True)
class Proof:
    """What was tried on one subject.

    Attributes:
        checks: identities that have to hold.
        tried: further ones, of which those that hold prove their points too.
        unproven: served points ``(name, layer)`` that no identity with a failing control pins down.
    """

    checks: tuple[Check, ...] = field(converter=as_tuple)
    tried: tuple[Check, ...] = field(converter=as_tuple)
    unproven: tuple[tuple[str, int | None], ...] = field(converter=as_tuple)

    def faults(self, excused: Mapping[str, str]) -> list[str]:
        """One sentence per identity that fails, and per point that nothing proves.

        Args:
            excused: reasons by point, such as ``attn_out``, or by place, such as ``attn_out.2``.
        """
        faults = [check.describe() for check in self.checks if check.fails]
        layers: dict[str, list[str]] = {}
        for name, layer in self.unproven:
            if name not in excused and f"{name}.{layer}" not in excused:
                layers.setdefault(name, []).append("the trunk" if layer is None else str(layer))
        for name, where in layers.items():
            asked = [check for check in (*self.checks, *self.tried) if name in check.proves and not check.proof]
            tried = sorted({check.describe() for check in asked})
            also = f" Tried: {'; '.join(tried)}." if tried else ""
            faults.append(
                f"{name} (layers: {', '.join(where)}) is declared but not proven: yield a Check that proves it from "
                f"identities(cache), or say why not in unproven = {{{name!r}: 'reason'}}.{also}"
            )
        return faults

    def stale(self, excused: Iterable[str]) -> list[str]:
        """Excuses that nothing needs: what they name is proven."""
        needed = {place for name, layer in self.unproven for place in (name, f"{name}.{layer}")}
        return [f"{name} is in unproven, and it is proven: take it out" for name in excused if name not in needed]


def prove(subject: Subject, more: Iterable[Check], tolerance: float) -> Proof:
    """Run every identity that the served points allow.

    Args:
        subject: the model under test.
        more: the author's own identities, and those with a reference.
        tolerance: of the kit's identities.
    """
    here, there = subject.captured(), subject.captured(subject.other_prompt)
    # Writes have tests of their own in the kit.
    found = examine(here, there, more=more, tolerance=tolerance, writes=False)
    unproven = [
        (name, layer)
        for name, verdicts in found.layers.items()
        for layer, verdict in verdicts.items()
        if verdict.state == UNCHECKED
    ]
    return Proof(checks=found.checks, tried=found.tried, unproven=unproven)
