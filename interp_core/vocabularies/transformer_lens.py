"""TransformerLens' hook names.

Read off the source of TransformerLensOrg/TransformerLens: ``components/transformer_block.py`` (where
``hook_attn_out`` lies behind ``ln1_post``, and which hooks lie before the norm), ``components/abstract_attention.py``
and ``grouped_query_attention.py`` (queries and keys are hooked before their norms; values before they are repeated
over a group), ``components/rms_norm.py`` and ``layer_norm.py`` (``hook_normalized`` lies before the gain),
``components/mlps/gated_mlp.py``, ``components/mlps/moe.py``; and, for names that only ``TransformerBridge`` has,
``model_bridge/generalized_components/block.py``, and the architecture of its multi-stream trunk.
"""

from __future__ import annotations

from typing import Final

from interp_core.vocabularies.records import Name, NoName, NotAPoint, Vocabulary

__all__ = ["TRANSFORMER_LENS"]

_BLOCK: Final = "blocks.{layer}."
_BRIDGE: Final = "TransformerBridge only"
_PER_GROUP: Final = "one per key/value head, unless ungroup_grouped_query_attention repeats them"
_GAIN: Final = (
    "TransformerLens takes it inside the norm, after the division and before the gain (and a folded model has "
    "moved the gain into the next weights)"
)
_PROJECTION: Final = "path.<module path of the projection>, on eager, such as path.model.layers.3.self_attn.q_proj"
_ROTATED: Final = "rotary embedding is applied inside attention, between two points"
_PER_HEAD_INPUT: Final = "it is the residual before the norm, once per head, which only TransformerLens forms"


def _at(hook: str, point: str, *when: str, note: str = "", near: str = "") -> Name:
    return Name(name=_BLOCK + hook, point=point, when=when, note=note, near=near)


def _not(hook: str, why: str, near: str) -> NotAPoint:
    return NotAPoint(name=_BLOCK + hook, why=why, near=near)


_NAMES: Final = (
    Name(name="hook_embed", point="embeddings"),
    Name(name="embed.hook_out", point="embeddings", note=_BRIDGE),
    _at("hook_resid_pre", "resid_pre", "one_stream", near="resid_pre.N.stream-K, or resid_streams of the block before"),
    _at("hook_in", "resid_pre", "one_stream", note=_BRIDGE, near="resid_streams of the block before"),
    _at("attn.hook_in", "attn_in", note=_BRIDGE),
    _at("attn.q_norm.hook_in", "q_norm_in", note=_BRIDGE),
    _at("attn.q_norm.hook_out", "q_norm_out", note=_BRIDGE),
    _at("attn.k_norm.hook_in", "k_norm_in", note=_BRIDGE),
    _at("attn.k_norm.hook_out", "k_norm_out", note=_BRIDGE),
    _at("attn.hook_q", "q_norm_in", "qk_norm", near=_PROJECTION),
    _at("attn.hook_k", "k_norm_in", "qk_norm", near=_PROJECTION),
    _at("attn.hook_v", "value", note=_PER_GROUP),
    _at("attn.hook_attn_scores", "attn_scores"),
    _at("attn.hook_pattern", "attn_probs"),
    _at("attn.hook_z", "z"),
    _at("hook_attn_out", "attn_out_post", "attn_post_norm"),
    _at("hook_attn_out", "attn_out", "no_attn_post_norm"),
    _at("hook_attn_out", "attn_out_post", "no_attn_post_norm", "unscaled"),
    _at("attn.hook_out", "attn_out", note=_BRIDGE),
    _at("ln1_post.hook_out", "attn_out_post", "attn_post_norm", note=_BRIDGE, near="attn_out"),
    _at("hook_resid_mid", "resid_mid", "one_stream", near="resid_pre and resid_post of the same layer"),
    _at("mlp.hook_in", "mlp_in", note=_BRIDGE),
    _at("mlp.hook_pre", "mlp_pre", "dense", near="mlp_in: on a mixture TransformerLens gives the block's input here"),
    _at("mlp.hook_pre_linear", "mlp_pre_linear", "dense", near="mlp_pre"),
    _at("mlp.hook_post", "mlp_act", "dense", near="mlp_out: on a mixture TransformerLens gives its output here"),
    _at("mlp.hook_expert_indices", "expert_indices", near="mlp_act"),
    _at("hook_mlp_out", "mlp_out_post", "mlp_post_norm"),
    _at("hook_mlp_out", "mlp_out", "no_mlp_post_norm"),
    _at("hook_mlp_out", "mlp_out_post", "no_mlp_post_norm", "unscaled"),
    _at("mlp.hook_out", "mlp_out", note=_BRIDGE),
    _at("ln2_post.hook_out", "mlp_out_post", "mlp_post_norm", note=_BRIDGE, near="mlp_out"),
    _at("hook_resid_post", "resid_post", "one_stream", near="resid_post.N.stream-K, or resid_streams"),
    _at("hook_out", "resid_post", "one_stream", note=_BRIDGE),
    _at("hook_out", "resid_streams", "streams", note=_BRIDGE),
    _at("attn_hc.hook_out", "attn_stream_collapse", "streams", note=_BRIDGE),
    _at("mlp_hc.hook_out", "mlp_stream_collapse", "streams", note=_BRIDGE),
    _at("attn_hc.hook_post", "attn_stream_write", "streams", note=_BRIDGE),
    _at("mlp_hc.hook_post", "mlp_stream_write", "streams", note=_BRIDGE),
    Name(name="unembed.hook_in", point="final_norm", note=_BRIDGE),
    Name(name="unembed.hook_out", point="lm_head", note=_BRIDGE),
)

_OTHERS: Final = (
    NotAPoint(
        name="hook_tokens", why="token ids are the request's own input", near="cache.token_ids, or model.to_tokens"
    ),
    NotAPoint(
        name="hook_pos_embed",
        why="a position table is no point",
        near="resid_pre.0 less embeddings, where positions are learned",
    ),
    NotAPoint(name="ln_final.hook_normalized", why=_GAIN, near="final_norm, which is after the gain"),
    NotAPoint(name="ln_final.hook_scale", why="the norm's divisor is no point", near="resid_post of the last layer"),
    _not("ln1.hook_normalized", _GAIN, "attn_in, which is after the gain, or resid_pre, from which it is computed"),
    _not("ln2.hook_normalized", _GAIN, "mlp_in, which is after the gain, or resid_mid, from which it is computed"),
    _not("attn.q_norm.hook_normalized", _GAIN, "q_norm_out, which is after the gain"),
    _not("attn.k_norm.hook_normalized", _GAIN, "k_norm_out, which is after the gain"),
    _not("ln1.hook_scale", "the norm's divisor is no point", "resid_pre, from which it is computed"),
    _not("ln2.hook_scale", "the norm's divisor is no point", "resid_mid, from which it is computed"),
    _not("hook_attn_in", _PER_HEAD_INPUT, "resid_pre, which it is a copy of, or attn_in, which attention reads"),
    _not("hook_mlp_in", "it is the residual before the norm", "resid_mid, which it is, or mlp_in, which the MLP reads"),
    _not("hook_q_input", _PER_HEAD_INPUT, "resid_pre"),
    _not("hook_k_input", _PER_HEAD_INPUT, "resid_pre"),
    _not("hook_v_input", _PER_HEAD_INPUT, "resid_pre"),
    _not("attn.hook_rot_q", _ROTATED, "q_norm_out, which is before it, or attn_scores, which is after it"),
    _not("attn.hook_rot_k", _ROTATED, "k_norm_out, which is before it, or attn_scores, which is after it"),
    _not("attn.hook_result", "each head's share of attn_out is never formed", "z.N.head-K times that head's weights"),
    _not("mlp.hook_mid", "no family here has a norm between activation and down projection", "mlp_act"),
    _not(
        "mlp.hook_expert_weights",
        "it is the softmax over all experts, before the choice",
        "router_logits, of which it is the softmax, or expert_weights, which the chosen ones are mixed with",
    ),
    _not("attn_hc.hook_in", "it is the stack that enters the block", "resid_streams of the block before"),
    _not("mlp_hc.hook_in", "it is the stack between the sublayers", "resid_mid.N.stream-K"),
    _not("attn_hc.hook_comb", "it is the matrix [from, to]", "attn_stream_mix, transposed: new = mix @ streams"),
    _not("mlp_hc.hook_comb", "it is the matrix [from, to]", "mlp_stream_mix, transposed: new = mix @ streams"),
)

_UNNAMED: Final = (
    NoName(
        point="attn_gate", why="TransformerLens has no hook on an attention gate", near="attn.hook_z, behind the gate"
    ),
    NoName(
        point="router_logits",
        why="TransformerLens hooks the softmax over all experts, not what it is taken of",
        near="mlp.hook_expert_weights, the softmax of router_logits",
    ),
    NoName(
        point="expert_weights",
        why="TransformerLens hooks the softmax over all experts, before the choice",
        near="mlp.hook_expert_weights and mlp.hook_expert_indices",
    ),
    NoName(
        point="attn_out_post",
        when=("scaled",),
        why="TransformerLens hooks the module's output, before the multiplier",
        near="hook_attn_out, which is attn_out",
    ),
    NoName(
        point="mlp_out_post",
        when=("scaled",),
        why="TransformerLens hooks the module's output, before the multiplier",
        near="hook_mlp_out, which is mlp_out",
    ),
    NoName(point="attn_stream_mix", why="TransformerLens' matrix is [from, to]", near="attn_hc.hook_comb, transposed"),
    NoName(point="mlp_stream_mix", why="TransformerLens' matrix is [from, to]", near="mlp_hc.hook_comb, transposed"),
)

TRANSFORMER_LENS: Final = Vocabulary(
    library="transformer_lens", title="TransformerLens", names=_NAMES, others=_OTHERS, unnamed=_UNNAMED
)
"""Hook names of ``HookedTransformer`` and ``TransformerBridge``."""
