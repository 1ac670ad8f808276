"""What the identities say of each point, layer by layer: proven, absent, failed or unchecked, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from attrs import field, frozen

from interp_core.address import Address
from interp_core.checks import Check
from interp_core.converters import as_tuple

__all__ = [
    "ABSENT",
    "FAILED",
    "PROVEN",
    "UNCHECKED",
    "Layers",
    "Place",
    "Verdict",
    "Verification",
    "listed_layers",
    "places_of",
]

PROVEN: Final = "proven"
ABSENT: Final = "absent"
FAILED: Final = "failed"
UNCHECKED: Final = "unchecked"

_WORST_FIRST: Final = (FAILED, UNCHECKED, PROVEN, ABSENT)

Place = tuple[str, int | None]
"""A point and a layer, ``None`` for the trunk."""

Layers = Mapping[str, Mapping[int | None, "Verdict"]]
"""Per point, per layer (``None`` for a trunk point), a verdict."""


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
    layers: Layers = field(factory=dict)
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

    @property
    def summary(self) -> str:
        """How many points are in which state, in one line."""
        states = list(self.points.values())
        counts = ", ".join(f"{states.count(state)} {state}" for state in (PROVEN, ABSENT, FAILED, UNCHECKED))
        return f"{len(states)} points: {counts}; {len(self.checks) + len(self.tried)} identities"

    def __str__(self) -> str:
        named = [f"{found}: {name}" for name, found in self.points.items() if found in (FAILED, UNCHECKED)]
        return "\n".join([self.summary, *named, *self.hints])


def _record(verdict: Verdict) -> dict[str, Any]:
    return {
        "state": verdict.state,
        "reason": verdict.reason,
        "error": verdict.error,
        "control": verdict.control,
        "identities": [check.identity for check in verdict.checks],
    }


def places_of(layers: Layers, state: str) -> set[Place]:
    """Points ``(name, layer)`` in a state."""
    return {(n, at) for n, found in layers.items() for at, verdict in found.items() if verdict.state == state}


def listed_layers(layers: Iterable[int]) -> str:
    """Layers in few words: ``layers 0-3, 7``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    alone = len(runs) == 1 and len(runs[0]) == 1
    return f"{'layer' if alone else 'layers'} {', '.join(texts)}"
