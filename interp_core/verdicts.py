"""What the identities say of each point, layer by layer: proven, absent, failed or unchecked, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from attrs import field, frozen

from interp_core.address import Address
from interp_core.captures import layers_of, parts_of
from interp_core.checks import Check
from interp_core.converters import as_tuple
from interp_core.points import PointSpec
from interp_core.profile import ModelProfile

__all__ = ["ABSENT", "FAILED", "PROVEN", "UNCHECKED", "Verdict", "Verification", "judge"]

PROVEN: Final = "proven"
ABSENT: Final = "absent"
FAILED: Final = "failed"
UNCHECKED: Final = "unchecked"

_WORST_FIRST: Final = (FAILED, UNCHECKED, PROVEN, ABSENT)

Place = tuple[str, int | None]
"""A point and a layer, ``None`` for the trunk."""


@frozen(kw_only=True)
class Verdict:
    """What became of one point at one layer.

    Attributes:
        state: ``proven`` (an identity whose control fails pins it down, and none that speaks of it fails),
            ``absent`` (the trunk has none, or the backend does not serve it), ``failed`` (an identity that has to
            hold does not) or ``unchecked`` (it is served, and nothing pins it down).
        reason: why, for every state but ``proven``.
        checks: the identities that decided it.
    """

    state: str
    reason: str = ""
    checks: tuple[Check, ...] = field(default=(), converter=as_tuple)

    @property
    def error(self) -> float | None:
        """The worst error of the identities that decided it; ``None`` where there is none."""
        return max((check.error for check in self.checks), default=None)

    @property
    def control(self) -> float | None:
        """The closest that a deliberately wrong variant came to holding; ``None`` where there is none."""
        return min((check.control for check in self.checks if check.control is not None), default=None)


@frozen(kw_only=True)
class Verification:
    """What the identities say about each point of a model.

    Attributes:
        checks: every identity that has to hold by the model's facts.
        tried: further ones, of which those that hold prove their points too: families make some parts in one of a
            few ways, and the facts do not say in which.
        layers: per point, per layer (``None`` for a trunk point), a :class:`Verdict`.
        hints: what the numbers show that the facts do not say, in words.
    """

    checks: tuple[Check, ...] = field(converter=as_tuple)
    tried: tuple[Check, ...] = field(default=(), converter=as_tuple)
    layers: Mapping[str, Mapping[int | None, Verdict]] = field(factory=dict)
    hints: tuple[str, ...] = field(default=(), converter=as_tuple)

    @property
    def points(self) -> dict[str, str]:
        """Per point its worst state over the layers, ``absent`` only if it is nowhere."""
        found = {}
        for name, verdicts in self.layers.items():
            states = {verdict.state for verdict in verdicts.values()}
            found[name] = next((state for state in _WORST_FIRST if state in states), ABSENT)
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed()

    @property
    def complete(self) -> bool:
        """Whether nothing failed and nothing stayed unchecked: every point is proven, or absent with its reason."""
        return self.ok and not self.places(UNCHECKED)

    def failed(self) -> tuple[Check, ...]:
        """The identities that have to hold and that the tensors contradict."""
        return tuple(check for check in self.checks if check.fails)

    def places(self, state: str) -> tuple[str, ...]:
        """Addresses in a state, such as ``("z.0", "z.1")``."""
        return tuple(
            str(Address(name, layer))
            for name, verdicts in self.layers.items()
            for layer, verdict in verdicts.items()
            if verdict.state == state
        )

    def describe(self) -> dict[str, Any]:
        """All of it as a JSON-able record."""
        return {
            "ok": self.ok,
            "complete": self.complete,
            "points": self.points,
            "layers": {
                name: {"trunk" if layer is None else str(layer): _record(verdict) for layer, verdict in found.items()}
                for name, found in self.layers.items()
            },
            "failed": [check.describe() for check in self.failed()],
            "hints": list(self.hints),
        }

    def __str__(self) -> str:
        states = list(self.points.values())
        counts = ", ".join(f"{states.count(state)} {state}" for state in (PROVEN, ABSENT, FAILED, UNCHECKED))
        lines = [f"{len(states)} points: {counts}; {len(self.checks) + len(self.tried)} identities"]
        for state in (FAILED, UNCHECKED):
            lines += [f"{state}: {name}" for name, found in self.points.items() if found == state]
        return "\n".join([*lines, *self.hints])


def _record(verdict: Verdict) -> dict[str, Any]:
    return {
        "state": verdict.state,
        "reason": verdict.reason,
        "error": verdict.error,
        "control": verdict.control,
        "identities": [check.identity for check in verdict.checks],
    }


def judge(
    profile: ModelProfile, checks: Iterable[Check], tried: Iterable[Check]
) -> dict[str, dict[int | None, Verdict]]:
    """A verdict for each point at each layer.

    Args:
        profile: of the model.
        checks: identities that have to hold.
        tried: identities that prove their points if they hold, and mean nothing if they do not.
    """
    due, further, concerned = (_by_place(profile, *pair) for pair in _pairs(list(checks), list(tried)))
    return {
        spec.name: {
            layer: _verdict(profile, spec, layer, due, further, concerned) for layer in layers_of(spec, profile)
        }
        for spec in profile.points()
    }


Index = dict[Place, list[Check]]


def _pairs(checks: list[Check], tried: list[Check]) -> Iterator[tuple[list[Check], str]]:
    yield checks, "proves"
    yield tried, "proves"
    yield checks, "concerns"


def _by_place(profile: ModelProfile, checks: list[Check], what: str) -> Index:
    found: Index = {}
    for check in checks:
        for text in getattr(check, what):
            name, _, number = text.partition(".")
            spec = profile.specs.get(name)
            layer = int(number) if number else check.layer
            trunk = spec is not None and spec.scope == "trunk"
            found.setdefault((name, None if trunk else layer), []).append(check)
    return found


def _verdict(
    profile: ModelProfile, spec: PointSpec, layer: int | None, due: Index, further: Index, concerned: Index
) -> Verdict:
    place = spec.name, layer
    if not parts_of(profile, spec, layer):
        refused = profile.read_refusal(Address(spec.name, layer))
        return Verdict(state=ABSENT, reason="" if refused is None else refused.why)
    mine, tried = due.get(place, []), further.get(place, [])
    failed = [check for check in (*mine, *concerned.get(place, ())) if check.fails]
    if failed:
        return Verdict(state=FAILED, reason="; ".join(check.describe() for check in failed), checks=failed)
    proofs = [check for check in (*mine, *tried) if check.proof]
    if proofs:
        return Verdict(state=PROVEN, checks=proofs)
    unsure = [*mine, *tried]
    said = "; ".join(check.describe() for check in unsure)
    return Verdict(
        state=UNCHECKED,
        reason=f"tried, and not enough: {said}" if said else "no identity speaks of it",
        checks=unsure,
    )
