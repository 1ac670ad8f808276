"""Points of a conventional decoder as expressions over the roles of transformers' module tree.

The tree may run in this process or in another engine: what matters is that it is transformers' own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from interp_core.address import Address
from interp_core.expressions import Binding, Derived, Expression, Place, Read, Scale, Slice, Sum
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.routing import Routing

if TYPE_CHECKING:
    from interp_core.layout import Layout

__all__ = ["bind"]

_TRUNK: Final = {
    "embeddings": Binding(Read("embed")),
    "lm_head": Binding(Read("lm_head")),
}


def bind(address: Address, facts: ModelFacts, layout: Layout) -> Binding:
    """Where a point lives. Coordinates are the caller's affair.

    Raises:
        KeyError: the point has no binding; profiles refuse such points before.
    """
    if address.name == "final_norm":
        # Some apply it twice in a forward, and the first time before the blocks.
        return Binding(Read("final_norm", call=facts.final_norm_call or None))
    if address.layer is None:
        return _TRUNK[address.name]
    layer = facts.layers[address.layer]
    if address.name in ("mlp_pre", "mlp_pre_linear"):
        return Binding(_branch(address.name, layer, facts, layout))
    if address.name in ("router_logits", "expert_weights", "expert_indices"):
        return Binding(_routed(address.name, facts.routing, layer.top_k))
    if address.name == "attn_gate":
        return Binding(_gate(layer, facts))
    if address.name == "value":
        return Binding(_finished(_value(layer, facts, layout), facts))
    if address.name == "resid_mid":
        return _resid_mid(layer, facts, layout)
    return Binding(_simple(layer, facts, layout)[address.name])


def _mlp_ends(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> tuple[str, str]:
    # A block without an MLP module has its two projections all the same.
    first, last = ("mlp", "mlp") if layout.has("mlp", layer.index) else ("mlp.up_proj", "mlp.down_proj")
    return first, "mlp.down_proj" if "mlp" in facts.adds_residual else last


def _simple(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> dict[str, Expression]:
    mlp_first, mlp_last = _mlp_ends(layer, facts, layout)
    beside = layout.has("mlp.beside", layer.index)
    mlp_out = Sum(Read(mlp_last), Read("mlp.beside")) if beside else Read(mlp_last)
    return {
        "resid_pre": _resid_pre(layer, layout),
        # One that attends by three arguments gets them all from its norm.
        "attn_in": Read("attn_in") if layout.has("attn_in", layer.index) else Read("attn", "input"),
        "q_norm_in": _head_norm("attn.q_norm", "input", facts),
        "q_norm_out": _head_norm("attn.q_norm", "output", facts),
        "k_norm_in": _head_norm("attn.k_norm", "input", facts),
        "k_norm_out": _head_norm("attn.k_norm", "output", facts),
        "z": Read("attn.o_proj", "input"),
        "attn_out": Read("attn.o_proj"),
        "attn_out_post": _attn_contribution(facts),
        # Two that stand side by side read what their norm gives.
        "mlp_in": Read("mlp_pre_norm") if beside else Read(mlp_first, "input"),
        "mlp_act": Read("mlp.down_proj", "input"),
        "mlp_out": mlp_out,
        "mlp_out_post": _scaled(Read("mlp_post_norm") if facts.mlp_post_norm else mlp_out, facts),
        "resid_post": Read("block"),
    }


def _head_norm(role: str, side: str, facts: ModelFacts) -> Read:
    axes = facts.qk_norm_axes
    return Read(role, side, heads_first=axes == "heads", merged=axes == "merged")


def _attn_contribution(facts: ModelFacts) -> Expression:
    raw = "attn.o_proj" if "attn" in facts.adds_residual else "attn"
    return _scaled(Read("attn_post_norm" if facts.attn_post_norm else raw), facts)


def _scaled(raw: Expression, facts: ModelFacts) -> Expression:
    return raw if facts.residual_multiplier == 1.0 else Scale(raw, facts.residual_multiplier)


def _resid_mid(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Binding:
    if facts.norm_on_sum:
        return Binding(Read("attn_sum_norm"))  # what it gives is all that flows on
    # The sum itself is the input of what follows; but the residual also flows past that module, so a write
    # must go into the sum's last term.
    read = Read("mlp_pre_norm" if facts.mlp_pre_norm else _mlp_ends(layer, facts, layout)[0], "input")
    return Binding(read, Sum(_resid_pre(layer, layout), _attn_contribution(facts)))


def _resid_pre(layer: LayerFacts, layout: Layout) -> Expression:
    # A block may begin with a norm whose output is the residual.
    return Read("block_in") if layout.has("block_in", layer.index) else Read("block", "input")


def _value(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    if layout.has("attn.v_proj", layer.index):
        return Read("attn.v_proj")
    heads, kv_heads, width = layer.n_heads, layer.n_kv_heads, layer.v_head_dim
    if layout.has("attn.qkv_per_head", layer.index):
        # Per group: its queries, then its key, then its value.
        parts = heads // kv_heads + 2
        return Slice(Read("attn.qkv_per_head"), (kv_heads, parts, width), (slice(None), parts - 1))
    if facts.model_type == "codegen":
        # Four blocks, whatever the size, each with its queries, then its values, then its keys.
        return Slice(Read("attn.qkv_thirds"), (4, 3, heads * width // 4), (slice(None), 1))
    skipped = heads * layer.head_dim + kv_heads * layer.head_dim
    return Slice(Read("attn.qkv_thirds"), (skipped + kv_heads * width,), (slice(skipped, None),))


def _finished(value: Expression, facts: ModelFacts) -> Expression:
    """The value as attention reads it: some clip the projection, or multiply it."""
    if facts.value_clip is not None:
        value = Derived((value,), partial(_clipped, facts.value_clip))
    return value if facts.value_scale == 1.0 else Scale(value, facts.value_scale)


def _clipped(bound: float, rows: Any, place: Place) -> Any:
    return rows.clamp(-bound, bound)


def _routed(name: str, routing: Routing, top_k: int) -> Expression:
    if name == "router_logits":
        return Read("mlp.router_logits") if routing.logits_module else Read("mlp.router", slot=routing.logits_slot)
    if name == "expert_indices" and routing.chosen_slot is not None:
        return Derived((Read("mlp.router", slot=routing.chosen_slot),), partial(_chosen, top_k))
    if name == "expert_indices":
        return Read("mlp.experts", "input", slot=routing.indices_slot)
    weights = Read("mlp.experts", "input", slot=routing.weights_slot)
    return weights if routing.factor == 1.0 else Scale(weights, routing.factor)


def _chosen(top_k: int, rows: Any, place: Place) -> Any:
    return rows.topk(top_k).indices


def _gate(layer: LayerFacts, facts: ModelFacts) -> Expression:
    if facts.attn_gate == "packed":
        # Per head: its query, then its gate.
        return Slice(Read("attn.q_proj"), (layer.n_heads, 2, layer.head_dim), (slice(None), 1))
    return Read("attn.gate_proj")


def _branch(name: str, layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    if not facts.gated_mlp:
        return Read("mlp.up_proj")
    if layout.has("mlp.gate_up_proj", layer.index):
        return Slice(Read("mlp.gate_up_proj"), (2, layer.d_mlp), (0 if name == "mlp_pre" else 1,))
    return Read("mlp.gate_proj" if name == "mlp_pre" else "mlp.up_proj")
