"""What of its points the hooked backend serves less of on some models, from facts and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interp_core.facts import ModelFacts
from interp_core.points import PointSupport, unsupported
from interp_vllm.native import PLAIN, model_impl

__all__ = ["SHARDED", "limits"]

SHARDED: Final = tuple(
    "q_norm_in q_norm_out k_norm_in k_norm_out value z attn_gate mlp_pre mlp_pre_linear mlp_act".split()
)
"""Points of which each tensor-parallel rank has a part."""


def limits(facts: ModelFacts, options: Mapping[str, Any]) -> dict[str, PointSupport]:
    """Support that replaces the general one, by point."""
    found: dict[str, PointSupport] = {}
    attention = _against_attention(facts)
    if attention:
        found |= dict.fromkeys(("attn_scores", "attn_probs"), unsupported(attention))
    if facts.attn_gate:
        found["attn_gate"] = unsupported("the gate of this family is not in the tables of the vLLM backend yet")
    if facts.final_norm_call:
        why = "this family applies its final norm twice in a forward, and here a module is read at every call"
        found |= dict.fromkeys(("final_norm", "lm_head"), unsupported(why))
    if facts.qk_norm_shared:
        why = "one module normalises queries and then keys in this family, and here a module is read at every call"
        found |= dict.fromkeys(("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"), unsupported(why))
    if any(layer.mlp == "sparse" for layer in facts.layers) and model_impl(facts, options) == "transformers":
        why = (
            "vLLM's Transformers backend replaces the router of a mixture of experts by its own; use the family's own "
            "class in vLLM, where there is one"
        )
        found |= dict.fromkeys(("router_logits", "expert_weights", "expert_indices"), unsupported(why))
    if "static_points" in options:
        found |= _static_limits(facts, options, found)
    return found


def _static_limits(
    facts: ModelFacts, options: Mapping[str, Any], found: Mapping[str, PointSupport]
) -> dict[str, PointSupport]:
    """What a compiled forward has no tap for."""
    limits: dict[str, PointSupport] = {}
    if model_impl(facts, options) == "transformers" or facts.architecture in PLAIN:
        why = (
            "the sum in the middle of a block is no module's own tensor in this tree, so a compiled forward can read "
            "it and not write it"
        )
        limits["resid_mid"] = PointSupport("hook", False, why)
    if (options.get("tensor_parallel_size") or 1) > 1:
        why = "a tap in a compiled forward holds one rank's part of this point; use backend='vllm'"
        limits |= {name: unsupported(why) for name in SHARDED if name not in found}
    return limits


def _against_attention(facts: ModelFacts) -> str:
    if facts.unknown_attention:
        return (
            f"the configuration names attention features that are not known: {', '.join(facts.unknown_attention)}; "
            "matrices rebuilt without them would be a guess"
        )
    if facts.score_terms:
        return f"this family's code applies {facts.score_terms}, which is not rebuilt yet"
    if facts.attn_difference:
        return "this family applies its attention to two halves of the values, which is not rebuilt yet"
    if facts.latent_attention:
        return "vLLM computes latent attention without ever forming keys per head, so there is nothing to rebuild from"
    chunked = [layer.index for layer in facts.layers if layer.mixer == "chunked_attention"]
    if chunked:
        return f"layers {chunked[0]} and others attend within chunks, which is not rebuilt yet"
    if any(layer.kv_shared_from is not None for layer in facts.layers):
        return "some layers of this family use the keys of earlier ones, which is not rebuilt yet"
    return ""
