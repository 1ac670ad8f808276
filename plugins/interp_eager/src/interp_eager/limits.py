"""What a model leaves the eager backend less of than others: answered from configuration, before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interp_core.facts import ModelFacts
from interp_core.points import PointSupport, hook, recompute

__all__ = ["limits"]

_CHOOSES: Final = "the router chooses the experts; write mlp_in"
_TOO_LATE: Final = (
    "the routers of this family return logits, weights and indices together, so changed logits would not change the "
    "choice; write expert_weights, or mlp_in"
)
_CLIPPED: Final = (
    "this model clips the value projection to a bound, so a write beyond it would be cut off without a word; write z"
)


def limits(facts: ModelFacts, options: Mapping[str, Any]) -> dict[str, PointSupport]:
    """Support that replaces the general one, by point."""
    del options
    found: dict[str, PointSupport] = {}
    if any(layer.mlp == "sparse" for layer in facts.layers) and not facts.routing.logits_module:
        found["router_logits"] = hook(writable=False, why=_TOO_LATE)
    if facts.routing.chosen_slot is not None:
        found["expert_indices"] = recompute(why=_CHOOSES)
    if facts.value_clip is not None:
        found["value"] = recompute(why=_CLIPPED)
    return found
