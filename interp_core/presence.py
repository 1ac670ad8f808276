"""Which general points a trunk has, layer by layer, from its facts; and why it lacks the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from interp_core.facts import LayerFacts, ModelFacts
from interp_core.points import PointSpec

__all__ = ["absences"]

_SOFTMAX_POINTS: Final = frozenset(
    "q_norm_in q_norm_out k_norm_in k_norm_out value attn_scores attn_probs z attn_gate".split()
)
_ATTENTION_POINTS: Final = _SOFTMAX_POINTS | {"attn_in", "attn_out", "attn_out_post"}
_NEURON_POINTS: Final = frozenset({"mlp_pre", "mlp_pre_linear", "mlp_act"})
_ROUTER_POINTS: Final = frozenset({"router_logits", "expert_weights", "expert_indices"})
_MLP_POINTS: Final = _NEURON_POINTS | _ROUTER_POINTS | {"mlp_in", "mlp_out", "mlp_out_post"}
_RESIDUALS: Final = frozenset({"resid_pre", "resid_mid", "resid_post"})


def absences(spec: PointSpec, facts: ModelFacts) -> dict[int | None, str]:
    """Reasons why ``spec`` is not there: per layer, or under ``None`` if it is nowhere."""
    whole = _whole_trunk(spec.name, facts)
    if not whole and spec.scope == "layer":
        whole = facts.absent.get("layers", "")
    if whole:
        return {None: whole}
    if spec.scope == "trunk":
        return {}
    found: dict[int | None, str] = {}
    for layer in facts.layers:
        reason = _in_layer(spec.name, layer, facts)
        if reason:
            found[layer.index] = reason
    if facts.layers and len(found) == len(facts.layers) and len(set(found.values())) == 1:
        return {None: next(iter(found.values()))}
    return found


def _whole_trunk(name: str, facts: ModelFacts) -> str:
    if name in _RESIDUALS and facts.n_streams > 1:
        return f"this trunk carries {facts.n_streams} residual streams, so there is no single residual vector"
    if not facts.structure_known:
        return facts.other_form or (
            f"the block structure of {facts.model_type!r} is not known, and a point is not guessed from names"
        )
    if name in facts.absent:
        return facts.absent[name]
    if name.startswith(("q_norm", "k_norm")) and not facts.qk_norm:
        return "this family has no query and key norms"
    if name == "attn_gate":
        return _no_gate(facts)
    if name == "value" and facts.latent_attention:
        return "with latent attention there is no value projection of its own"
    if name == "embeddings" and facts.embedding_width:
        return (
            f"the token embedding has a width of {facts.embedding_width}, and a projection makes the residual's "
            f"{facts.d_model} of it: there is no embedding of that width"
        )
    if name == "final_norm" and not facts.final_norm:
        return "this family has no norm between the last block and the unembedding"
    return ""


def _no_gate(facts: ModelFacts) -> str:
    if not facts.attn_gate:
        return "this family does not gate its attention output"
    if facts.attn_gate == "per_head":
        return (
            "this model gates each head by one number, so the gate has an axis of heads and none of head_dim; on eager "
            "path.<attention module>.g_proj reads it"
        )
    return ""


def _in_layer(name: str, layer: LayerFacts, facts: ModelFacts) -> str:
    if layer.mixer == "cross_attention":
        return "this layer attends to what an image or the like gives it, and is passed over where there is none"
    if name in layer.absent:
        return layer.absent[name]
    for names, reason in _LAYER_RULES.items():
        if name in names:
            found = reason(layer)
            if found:
                return found
    if name == "mlp_pre_linear" and not facts.gated_mlp:
        return "this family's MLP has no gate, so it has no separate linear branch"
    return ""


def _softmax(layer: LayerFacts) -> str:
    return "" if layer.softmax else f"the mixer of this layer is {layer.mixer}, which has no softmax attention"


def _attention(layer: LayerFacts) -> str:
    return "" if layer.mixer != "none" else "this layer has no token mixer"


def _mlp(layer: LayerFacts) -> str:
    return "" if layer.mlp != "none" else "this layer has no MLP"


def _neurons(layer: LayerFacts) -> str:
    return (
        "" if layer.mlp == "dense" else "the MLP of this layer is a mixture of experts, which has no one set of neurons"
    )


def _router(layer: LayerFacts) -> str:
    return "" if layer.mlp == "sparse" else "the MLP of this layer is dense: it has no router and no experts"


def _middle(layer: LayerFacts) -> str:
    if layer.parallel:
        return "attention and MLP of this block run in parallel on one residual, so nothing lies between them"
    if layer.mixer == "none" or layer.mlp == "none":
        return "this block has one sublayer, so nothing lies between two"
    return ""


def _own_values(layer: LayerFacts) -> str:
    shared = layer.kv_shared_from
    return "" if shared is None else f"this layer uses the keys and values of layer {shared}"


_LAYER_RULES: Final[Mapping[frozenset[str], Callable[[LayerFacts], str]]] = {
    _MLP_POINTS: _mlp,
    _NEURON_POINTS: _neurons,
    _ROUTER_POINTS: _router,
    _ATTENTION_POINTS: _attention,
    _SOFTMAX_POINTS: _softmax,
    frozenset({"value", "k_norm_in", "k_norm_out"}): _own_values,
    frozenset({"resid_mid"}): _middle,
}
