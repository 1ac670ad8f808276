"""What a model leaves the eager backend less of than others: answered from configuration, before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interp_core.facts import ModelFacts
from interp_core.points import PointSupport, hook

__all__ = ["limits"]

_TOO_LATE: Final = (
    "the routers of this family return logits, weights and indices together, so changed logits would not change the "
    "choice; write expert_weights, or mlp_in"
)


def limits(facts: ModelFacts, options: Mapping[str, Any]) -> dict[str, PointSupport]:
    """Support that replaces the general one, by point."""
    del options
    if any(layer.mlp == "sparse" for layer in facts.layers) and not facts.routing.logits_module:
        return {"router_logits": hook(writable=False, why=_TOO_LATE)}
    return {}
