"""Which points the identities pin down, and which are declared and not proven."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from attrs import field, frozen

from interp_core.checks import Check
from interp_core.converters import as_tuple
from interp_core.testing.causes import causal_identities
from interp_core.testing.mixtures import variant_identities
from interp_core.testing.norms import collapse_identities, norm_identities
from interp_core.testing.served import Subject
from interp_core.verify import verify

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
        faults = [_failed(check) for check in self.checks if not check.holds]
        layers: dict[str, list[str]] = {}
        for name, layer in self.unproven:
            if name not in excused and f"{name}.{layer}" not in excused:
                layers.setdefault(name, []).append("the trunk" if layer is None else str(layer))
        for name, where in layers.items():
            tried = sorted({_failed(check) for check in self.tried if name in check.proves and not check.holds})
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


def _failed(check: Check) -> str:
    control = "none" if check.control is None else f"{check.control:.1e}"
    where = "" if check.layer is None else f" at layer {check.layer}"
    return (
        f"'{check.identity}'{where} fails: error {check.error:.1e}, control {control}, tolerance {check.tolerance:.0e}"
    )


def prove(subject: Subject, more: Iterable[Check], tolerance: float, gainless: Collection[str]) -> Proof:
    """Run every identity that the served points allow.

    Args:
        subject: the model under test.
        more: the author's own identities, and those with a reference.
        tolerance: of the kit's identities.
        gainless: points behind norms that have no gain.
    """
    facts, get = subject.profile.facts, subject.get()
    ours = list(verify(subject.model, subject.prompts[0]).checks)
    checks = [*ours, *norm_identities(facts, get, tolerance, gainless), *more]
    scale = subject.setting("routed_scaling_factor", 1.0)
    tried = [*variant_identities(facts, get, tolerance, scale), *collapse_identities(facts, get, tolerance)]
    served = dict.fromkeys((address.name, address.layer) for address in subject.readable())
    left = set(served) - _proven([*checks, *tried])
    if subject.profile.refusal("steer") is None and left:
        tried += causal_identities(subject, left, tolerance)
    left -= _proven(tried)
    return Proof(checks=checks, tried=tried, unproven=[point for point in served if point in left])


def _proven(checks: Iterable[Check]) -> set[tuple[str, int | None]]:
    """Points that an identity pins down by itself: it holds, and a wrong variant of it does not."""
    found = set()
    for check in checks:
        if not check.holds or check.control is None:
            continue
        for name in check.proves:
            found |= {(name, check.layer)} | _implied(name, check)
    return found


def _implied(name: str, check: Check) -> set[tuple[str, int | None]]:
    """Places that an identity speaks of without being at them."""
    if name in ("resid_post", "resid_pre") and check.layer is not None and "next layer" in check.identity:
        return {("resid_pre", check.layer + 1)}
    if name in ("embeddings", "lm_head", "final_norm"):
        return {(name, None)}
    return set()
