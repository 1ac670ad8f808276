"""Identities of norms: what stands behind one is what stands before it, normalised, times a gain per channel.

The gain is not known to a stranger, so it is fitted over the positions of a prompt: one or two numbers per channel for
a dozen positions. Where the fitted gains are all alike nothing is proven, since a point taken before the gain looks so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from interp_core.checks import Check, Get, difference
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.fits import fit_gain, normalised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["collapse_identities", "norm_identities"]

_SPREAD: Final = 1e-3  # of fitted gains, relative to their mean; random ones differ by some per cent
_ALIKE: Final = " (all alike here, so that it may be taken before its gain)"


def norm_identities(facts: ModelFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """What stands on both sides of each norm that the facts name, and of each place where they name none."""
    for layer in facts.layers:
        for source, target, normed in _sides(facts, layer):
            if source.endswith("_stream_collapse"):
                continue  # Trunks of several streams differ in where the norm is: see collapse_identities.
            before, after = get(source, layer.index), get(target, layer.index)
            if before is None or after is None or target in facts.gated_behind:
                continue
            at: int | None = layer.index
            if normed:
                whole = target[1:] == "_norm_out" and facts.qk_norm == "full"
                yield _fitted(facts, source, target, at, (before, after), tolerance, whole=whole)
            else:
                half = target.removesuffix("_out_post")
                factor = facts.residual_multiplier * layer.factors.get(half, 1.0) if half != target else 1.0
                yield _equal(source, target, at, (before * factor, after), tolerance)
    last, final = get("resid_post", facts.last_layer), get("final_norm", None)
    if facts.n_streams == 1 and facts.final_norm and last is not None and final is not None:
        yield _fitted(facts, "the last resid_post", "final_norm", None, (last, final), tolerance)


def collapse_identities(facts: ModelFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """On a trunk of several streams, what a sublayer reads of its collapse: through a norm, or as it is."""
    for layer in facts.layers:
        for site in ("attn", "mlp"):
            source, target = f"{site}_stream_collapse", f"{site}_in"
            before, after = get(source, layer.index), get(target, layer.index)
            if before is None or after is None:
                continue
            pair = (before, after)
            through = _fitted(facts, source, target, layer.index, pair, tolerance)
            yield through if through.holds else _equal(source, target, layer.index, pair, tolerance)


def _sides(facts: ModelFacts, layer: LayerFacts) -> Iterator[tuple[str, str, bool]]:
    """Source, target, and whether a norm stands between them."""
    several, norms = facts.n_streams > 1, facts.norms(layer.index)
    residual = "resid_pre" if layer.parallel or layer.mixer == "none" else "resid_mid"
    # A parallel block whose MLP has no norm of its own reads what attention reads.
    shared = layer.parallel and "mlp_pre_norm" not in norms
    yield ("attn_stream_collapse" if several else "resid_pre"), "attn_in", "attn_pre_norm" in norms
    if shared:
        yield "attn_in", "mlp_in", False
    else:
        source = "mlp_stream_collapse" if several else facts.contributions.mlp_reads or residual
        yield source, "mlp_in", "mlp_pre_norm" in norms
    for half in ("attn", "mlp"):
        if facts.plain_contribution(half):
            yield f"{half}_out", f"{half}_out_post", f"{half}_post_norm" in norms
    yield "q_norm_in", "q_norm_out", True
    yield "k_norm_in", "k_norm_out", True


def _equal(source: str, target: str, layer: int | None, pair: tuple[Tensor, Tensor], tolerance: float) -> Check:
    before, after = pair
    return Check(
        identity=f"{source}, without a norm between, is {target}",
        layer=layer,
        proves=(source, target) if source.endswith(("_out", "collapse")) else (target,),
        error=difference(before, after),
        control=difference(before.roll(1, 0), after),
        tolerance=tolerance,
    )


def _fitted(
    facts: ModelFacts,
    source: str,
    target: str,
    layer: int | None,
    pair: tuple[Tensor, Tensor],
    tolerance: float,
    *,
    whole: bool = False,
) -> Check:
    before, after = (t.double().flatten(1) if whole else t.double() for t in pair)
    centred = facts.norm == "layer" or target in facts.centred_behind
    normal = normalised(before, facts.eps_behind.get(target, facts.norm_eps), centred=centred)
    error, spread = fit_gain(normal, after, centred=centred)
    # As if it were taken between the norm and its gain: that would look the same.
    alike = spread < _SPREAD and target not in facts.gainless
    wrong, _ = fit_gain(normal.roll(1, -1), after, centred=centred)
    bare, _ = fit_gain(before, after, centred=centred)
    return Check(
        identity=f"{source}, normalised and times one gain per channel{_ALIKE if alike else ''}, is {target}",
        layer=layer,
        proves=(source, target) if source.endswith(("_in", "_out", "collapse")) else (target,),
        error=error,
        control=None if alike else min(wrong, bare),
        tolerance=tolerance,
    )
