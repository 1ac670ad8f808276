"""Points of a conventional decoder as expressions over the roles of transformers' module tree.

The tree may run in this process or in another engine: what matters is that it is transformers' own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from interp_core.address import Address
from interp_core.expressions import Binding, Derived, Expression, Learned, Place, Read, Scale, Slice, Sum
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.routing import Routing

if TYPE_CHECKING:
    from interp_core.layout import Layout

__all__ = ["bind"]

_TRUNK: Final = {
    "embeddings": Binding(Read("embed")),
    "lm_head": Binding(Read("lm_head")),
}

_MLPS: Final = ("mlp", "mlp.beside")
"""Roles whose outputs together are the MLP's, in the order of the forward; a block without the module lacks it."""


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
    return {
        "resid_pre": _resid_pre(layer, layout),
        # One that attends by three arguments gets them all from its norm.
        "attn_in": Read("attn_in") if layout.has("attn_in", layer.index) else Read("attn", "input"),
        "q_norm_in": _head_norm("attn.q_norm", "input", 0, layer, facts, layout),
        "q_norm_out": _head_norm("attn.q_norm", "output", 0, layer, facts, layout),
        "k_norm_in": _head_norm("attn.k_norm", "input", 1, layer, facts, layout),
        "k_norm_out": _head_norm("attn.k_norm", "output", 1, layer, facts, layout),
        "z": Read("attn.o_proj", "input"),
        # Where its parts are fused, a mixer that is no softmax attention may pass its last projection by.
        "attn_out": Read("attn.o_proj" if layer.softmax else "attn"),
        "attn_out_post": _contribution("attn", layer, facts, layout),
        "mlp_in": _mlp_in(layer, facts, layout),
        "mlp_act": Read("mlp.down_proj", "input"),
        "mlp_out": _mlp_out(layer, facts, layout),
        "mlp_out_post": _contribution("mlp", layer, facts, layout),
        "resid_post": Read("block"),
    }


def _head_norm(role: str, side: str, slot: int, layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Read:
    if layout.has("attn.qk_norm", layer.index):
        return Read("attn.qk_norm", side, slot)  # one module for both, in one call
    axes, call = facts.qk_norm_axes, slot if facts.qk_norm_shared else None
    return Read(role, side, call=call, heads_first=axes == "heads", merged=axes == "merged")


def _mlp_in(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    if len(_distinct(_MLPS, layer, layout)) > 1:
        return Read("mlp_pre_norm")  # two that stand side by side read what their norm gives
    return Read(_mlp_ends(layer, facts, layout)[0], "input")


def _mlp_out(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    parts = _distinct(_MLPS, layer, layout)
    if len(parts) > 1:
        return _total([Read(role) for role in parts])
    if layer.mlp == "sparse" and layout.has("mlp_post_norm", layer.index):
        return Read("mlp_post_norm", "input")  # experts may have a module beside the MLP's, and no module their sum
    return Read(_mlp_ends(layer, facts, layout)[1])


def _contribution(half: str, layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    """What ``attn`` or ``mlp`` adds to the residual."""
    stated = facts.contributions.attn_terms if half == "attn" else facts.contributions.mlp_terms
    roles = _distinct(stated, layer, layout)
    if roles:
        found = _total([_scaled(Read(role), layer.factors.get(role, 1.0)) for role in roles])
    else:
        behind = next(
            (f"{half}_{name}" for name in ("post", "post_norm") if layout.has(f"{half}_{name}", layer.index)), ""
        )
        inside = "attn.o_proj" if "attn" in facts.adds_residual else "attn"
        raw = Read(inside) if half == "attn" else _mlp_out(layer, facts, layout)
        found = _scaled(Read(behind) if behind else raw, layer.factors.get(half, 1.0))
    return _scaled(_weighted(found, half, layer, facts, layout), facts.residual_multiplier)


def _distinct(roles: tuple[str, ...], layer: LayerFacts, layout: Layout) -> list[str]:
    """Those roles that the block has, each module once."""
    modules = {id(layout.module(role, layer.index)): role for role in reversed(roles) if layout.has(role, layer.index)}
    return [role for role in roles if role in modules.values()]


def _total(terms: list[Expression]) -> Expression:
    first, *others = terms
    for other in others:
        first = Sum(first, other)
    return first


def _scaled(of: Expression, factor: float) -> Expression:
    return of if factor == 1.0 else Scale(of, factor)


def _weighted(of: Expression, what: str, layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    weights = facts.contributions.weights.get(what)
    if weights is None:
        return of
    owner = layout.module(weights.role, layer.index)
    if getattr(owner, weights.weight or weights.bias, None) is None:
        return of  # some blocks lack them
    return Learned(of, owner, weights.weight, weights.bias)


def _resid_mid(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Binding:
    if facts.norm_on_sum:
        return Binding(Read("attn_sum_norm"))  # what it gives is all that flows on
    if layout.has("attn_join", layer.index):
        return Binding(Read("attn_join"))  # a module makes the sum
    read = Read(
        "mlp_pre_norm" if "mlp_pre_norm" in facts.norms(layer.index) else _mlp_ends(layer, facts, layout)[0], "input"
    )
    if facts.contributions.mlp_skip == "normed":
        return Binding(read)  # only what this norm gives flows on
    # The sum itself is the input of what follows; but the residual also flows past that module, so a write
    # must go into the sum's last term.
    kept = _weighted(_resid_pre(layer, layout), "attn_skip", layer, facts, layout)
    return Binding(read, Sum(kept, _contribution("attn", layer, facts, layout)))


def _resid_pre(layer: LayerFacts, layout: Layout) -> Expression:
    # A block may begin with a norm whose output is the residual.
    return Read("block_in") if layout.has("block_in", layer.index) else Read("block", "input")


def _value(layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    if layout.has("attn.v_norm", layer.index):
        return Read("attn.v_norm")
    if layout.has("attn.split", layer.index):
        return Read("attn.split", slot=2)  # a module gives queries, keys and values
    if layout.has("attn.v_proj", layer.index):
        return _adapted("attn.v_proj", "attn.v_adapter", layer, layout)
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
        shape = (layer.n_heads, layer.head_dim + layer.v_head_dim)
        return Slice(Read("attn.q_proj"), shape, (slice(None), slice(layer.head_dim, None)))
    return Read("attn.gate_proj")


def _adapted(role: str, adapter: str, layer: LayerFacts, layout: Layout) -> Expression:
    """A projection, plus that of an adapter beside it, where there is one."""
    return Sum(Read(role), Read(adapter)) if layout.has(adapter, layer.index) else Read(role)


def _branch(name: str, layer: LayerFacts, facts: ModelFacts, layout: Layout) -> Expression:
    if not facts.gated_mlp:
        return Read("mlp.up_proj")
    if layout.has("mlp.gate_up_proj", layer.index):
        fused = _adapted("mlp.gate_up_proj", "mlp.gate_up_adapter", layer, layout)
        return Slice(fused, (2, layer.d_mlp), (0 if name == "mlp_pre" else 1,))
    role = "mlp.gate_proj" if name == "mlp_pre" else "mlp.up_proj"
    return _scaled(Read(role), layer.factors.get(role, 1.0))
