"""Identities of blocks that normalise each sum of residual and contribution.

The gain and bias of a norm are no captured tensors, so they are fitted over the positions: two numbers per channel for
a dozen positions. A contribution that is not the one which was added cannot be fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from interp_core.checks import Check, Get
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.fits import fit_gain, normalised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sum_norm_identities", "unfitted"]

_LEAST: Final = 4  # positions: two are fitted exactly by any vector
_STEPS: Final = (("resid_pre", "attn_out_post", "resid_mid"), ("resid_mid", "mlp_out_post", "resid_post"))


def sum_norm_identities(facts: ModelFacts, layer: LayerFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """``norm(residual + contribution)`` is the residual that follows, for each sublayer whose parts were captured."""
    for before, contribution, after in _STEPS:
        parts = [get(name, layer.index) for name in (before, contribution, after)]
        residual, added, wanted = parts
        if residual is None or added is None or wanted is None or wanted.shape[0] < _LEAST:
            continue
        # The two terms in other shares are another vector, and so is either of them alone.
        wrong = min(unfitted(facts, x, wanted) for x in (residual, residual + 0.9 * added, residual + added.roll(1, 0)))
        yield Check(
            identity=f"{before} + {contribution}, normalised, is {after}",
            layer=layer.index,
            proves=(before, contribution, after),
            error=unfitted(facts, residual + added, wanted),
            control=wrong,
            tolerance=tolerance,
        )


def unfitted(facts: ModelFacts, total: Tensor, wanted: Tensor) -> float:
    """How far the best gain and bias per channel leave ``total``, normalised, from ``wanted``; ``[pos, d_model]``."""
    x = normalised(total.double(), facts.norm_eps, centred=facts.norm == "layer")
    return fit_gain(x, wanted.double(), centred=facts.norm == "layer")[0]
