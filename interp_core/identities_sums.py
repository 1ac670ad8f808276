"""Identities of what a block adds up: the residual, or what it keeps of it, plus each sublayer's contribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get, difference, misfit
from interp_core.facts import LayerFacts, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["per_channel", "sum_identities"]


def sum_identities(facts: ModelFacts, layer: LayerFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """Each sum that a block makes, whose parts were captured."""
    pre, mid, post = (get(name, layer.index) for name in ("resid_pre", "resid_mid", "resid_post"))
    attn, mlp = get("attn_out_post", layer.index), get("mlp_out_post", layer.index)
    if pre is None:
        return
    if layer.parallel:
        if attn is not None and mlp is not None and post is not None:
            yield _plain(layer, get, ("resid_pre", "attn", "mlp", "resid_post"), (pre, attn, mlp), post, tolerance)
        return
    if attn is not None and mid is not None:
        yield _half(facts, layer, get, ("resid_pre", "attn", "resid_mid"), (pre, attn), mid, tolerance)
    if mid is not None and mlp is not None and post is not None:
        yield _half(facts, layer, get, ("resid_mid", "mlp", "resid_post"), (mid, mlp), post, tolerance)
    if mid is None and post is not None and (attn is None) is not (mlp is None):
        # A block of one sublayer, or of several of which one adds to the residual.
        half, added = ("mlp", mlp) if attn is None else ("attn", attn)
        if added is not None:
            yield _half(facts, layer, get, ("resid_pre", half, "resid_post"), (pre, added), post, tolerance)


def per_channel(x: Tensor, y: Tensor) -> Tensor:
    """The best ``weight * x + bias`` per channel for ``y``; both are ``[pos, channel]``."""
    x, y = x.double(), y.double()
    dx, dy = x - x.mean(0), y - y.mean(0)
    weight = (dx * dy).sum(0) / dx.square().sum(0).clamp(min=1e-300)
    return weight * dx + y.mean(0)


def _half(
    facts: ModelFacts,
    layer: LayerFacts,
    get: Get,
    names: tuple[str, str, str],
    terms: tuple[Tensor, Tensor],
    total: Tensor,
    tolerance: float,
) -> Check:
    before, half, after = names
    skip = facts.contributions.attn_skip if half == "attn" else facts.contributions.mlp_skip
    if skip == "learned":
        return _learned(layer, names, terms, total, tolerance)
    if skip == "normed":
        kept = get(f"{half}_in", layer.index)
        if kept is not None:
            factor = layer.factors.get(f"{half}_skip", 1.0)
            return _plain(layer, get, (f"{half}_in", half, after), (kept * factor, terms[1]), total, tolerance, factor)
    return _plain(layer, get, (before, half, after), terms, total, tolerance)


def _plain(
    layer: LayerFacts,
    get: Get,
    names: tuple[str, ...],
    terms: tuple[Tensor, ...],
    total: Tensor,
    tolerance: float,
    factor: float = 1.0,
) -> Check:
    first, *halves, last = names
    start, *contributions = terms
    # Where a post-norm or multiplier stands between, the raw outputs must fail; else a missing term must.
    wrong = value = start
    for half, term in zip(halves, contributions, strict=True):
        value = value + term
        raw = get(f"{half}_out", layer.index)
        wrong = wrong + (raw if raw is not None and difference(raw, term) > 10 * tolerance else 0 * term)
    points = [f"{half}_out_post" for half in halves]
    scaled = first if factor == 1.0 else f"{factor:g} * {first}"
    return Check(
        identity=f"{' + '.join([scaled, *points])} is {last}",
        layer=layer.index,
        proves=(*points, first, last),
        error=misfit(value, total, terms),
        control=misfit(wrong, total, terms),
        tolerance=tolerance,
    )


def _learned(
    layer: LayerFacts,
    names: tuple[str, str, str],
    terms: tuple[Tensor, Tensor],
    total: Tensor,
    tolerance: float,
) -> Check:
    """The weights are the checkpoint's own: fitted over the positions of a prompt, one or two numbers per channel."""
    before, half, after = names
    kept, added = terms[0], terms[1].double()
    weighed = per_channel(kept, total.double() - added)
    scale = (weighed, added)  # measured against what the contribution changes, and not the weight
    return Check(
        identity=f"{before}, times one weight per channel and plus one bias, + {half}_out_post is {after}",
        layer=layer.index,
        proves=(f"{half}_out_post", before, after),
        error=misfit(weighed + added, total, scale),
        control=misfit(per_channel(kept, total), total, scale),
        tolerance=tolerance,
    )
