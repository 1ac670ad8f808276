"""From identities to a verdict for each point at each layer, and which of those that fail to look at first."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from interp_core.address import Address
from interp_core.captures import layers_of, parts_of
from interp_core.checks import Check
from interp_core.points import PointSpec
from interp_core.profile import ModelProfile
from interp_core.verdicts import ABSENT, FAILED, PROVEN, UNCHECKED, Layers, Place, Verdict, listed_layers, places_of

__all__ = ["Bench"]


@define(eq=False)
class Bench:
    """Identities, and what they say together.

    Attributes:
        profile: of the model.
        checks: identities that have to hold.
        tried: identities that prove their points if they hold, and mean nothing if they do not.
    """

    profile: ModelProfile
    checks: list[Check] = field(factory=list)
    tried: list[Check] = field(factory=list)

    def layers(self) -> Layers:
        """A verdict for each point at each layer."""
        due, tried, concerned = self._index(self.checks), self._index(self.tried), self._index(self.checks, "concerns")
        return {
            spec.name: {
                at: self._absent(spec, at)
                or _verdict(*(index.get((spec.name, at), []) for index in (due, tried, concerned)))
                for at in layers_of(spec, self.profile)
            }
            for spec in self.profile.points()
        }

    def suspects(self, layers: Layers) -> list[str]:
        """Of the points that failed, those for which no identity holds at all: a wrong one drags others along."""
        proven = set(self._index([check for check in (*self.checks, *self.tried) if check.proof]))
        failed = places_of(layers, FAILED)
        alone = failed - proven
        if not alone or alone == failed:
            return []
        names = [name for name in layers if any(name == place[0] for place in alone)]
        where = {name: [at for other, at in alone if other == name and at is not None] for name in names}
        listed = ", ".join(f"{name} ({listed_layers(found)})" if found else name for name, found in where.items())
        return [f"look first at {listed}: no identity that speaks of them holds, and of all else that failed some do"]

    def _index(self, checks: Iterable[Check], what: str = "proves") -> dict[Place, list[Check]]:
        found: dict[Place, list[Check]] = {}
        for check in checks:
            for text in getattr(check, what):
                name, _, number = text.partition(".")
                spec = self.profile.specs.get(name)
                trunk = spec is not None and spec.scope == "trunk"
                at = None if trunk else int(number) if number else check.layer
                found.setdefault((name, at), []).append(check)
        return found

    def _absent(self, spec: PointSpec, layer: int | None) -> Verdict | None:
        if parts_of(self.profile, spec, layer):
            return None
        refused = self.profile.read_refusal(Address(spec.name, layer))
        return Verdict(state=ABSENT, reason="" if refused is None else refused.why)


def _verdict(due: list[Check], tried: list[Check], concerned: list[Check]) -> Verdict:
    failed = [check for check in (*due, *concerned) if check.fails]
    if failed:
        return Verdict(state=FAILED, reason="; ".join(check.describe() for check in failed), checks=failed)
    unsure = [*due, *tried]
    proofs = [check for check in unsure if check.proof]
    if proofs:
        return Verdict(state=PROVEN, checks=proofs)
    said = "; ".join(check.describe() for check in unsure)
    reason = f"tried, and not enough: {said}" if said else "no identity speaks of it"
    return Verdict(state=UNCHECKED, reason=reason, checks=unsure)
