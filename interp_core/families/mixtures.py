"""Mixtures of experts whose blocks are otherwise conventional."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from interp_core.families.bases import (
    COHERE,
    EXPERT_HEADS,
    GATED_HYBRID,
    GRANITE,
    LLAMA,
    MIXED_AT_THE_INPUT,
    NORMS_AFTER_ROTARY,
    POSITION_FACTOR,
    POST_NORM,
    SANDWICH,
    SLIDING,
    TYPED,
)
from interp_core.family import FamilyFacts

__all__ = ["ROWS"]

ROWS: Final[dict[str, FamilyFacts]] = {
    # Mixtures of experts
    "mixtral": SLIDING,
    "qwen2_moe": TYPED,
    "qwen3_moe": evolve(SLIDING, qk_norm="head"),
    "qwen3_vl_moe_text": evolve(LLAMA, qk_norm="head"),
    "minimax_m3_vl_text": evolve(
        TYPED,
        qk_norm="head",
        activation="swigluoai",
        key_budget_key="index_topk_blocks",
        key_block_key="index_block_size",
        key_budget_kind="minimax_m3_sparse",
    ),
    "step3p5": evolve(
        TYPED,
        qk_norm="head",
        attn_gate="separate",
        attn_gate_key="gating",
        attn_gate_per_head=(True, "per-head"),
        activation_limits_key="swiglu_limits_shared",
    ),
    "qwen3_omni_moe_text": evolve(LLAMA, qk_norm="head"),
    "qwen3_next": GATED_HYBRID,
    "qwen3_5_moe_text": GATED_HYBRID,
    "olmoe": evolve(LLAMA, qk_norm="full"),
    "flex_olmo": evolve(POST_NORM, qk_norm="full"),
    "granitemoe": GRANITE,
    "jetmoe": evolve(LLAMA, roles={"attn": "self_attention", "attn.o_proj": "self_attention"}, absent=EXPERT_HEADS),
    "gpt_oss": evolve(TYPED, sinks=True),
    "phimoe": evolve(SLIDING, norm="layer"),
    "aria_text": LLAMA,
    "deepseek_ocr2_text": LLAMA,
    "dots1": evolve(TYPED, qk_norm="head"),
    "ernie4_5_moe": LLAMA,
    "ernie4_5_vl_moe_text": evolve(
        LLAMA, roles={"mlp.router": "mlp.text_moe.gate", "mlp.experts": "mlp.text_moe.experts"}
    ),
    "exaone_moe": evolve(TYPED, qk_norm="head", qk_norm_axes="heads"),
    "glm4_moe": evolve(LLAMA, qk_norm="head", qk_norm_key="use_qk_norm"),
    "glm4v_moe_text": LLAMA,
    "mellum": evolve(TYPED, qk_norm="head"),
    "minimax_m2": evolve(LLAMA, qk_norm="full"),
    "solar_open": LLAMA,
    "cohere2_moe": evolve(COHERE, norm="", windows="typed"),
    "hunyuan_v1_moe": evolve(LLAMA, absent=NORMS_AFTER_ROTARY, shared_experts=1),
    "hy_v3": evolve(LLAMA, qk_norm="head", qk_norm_axes="heads"),
    "granitemoeshared": GRANITE,
    "granite_swa": evolve(GRANITE, windows="typed", sinks=True),
    "granitemoe_swa": evolve(GRANITE, windows="typed", sinks=True),
    "laguna": evolve(
        TYPED,
        qk_norm="head",
        attn_gate="separate",
        attn_gate_key="gating",
        attn_gate_per_head=(True, "per-head"),
        attn_gate_activation="softplus",
    ),
    "mimo_v2_flash": evolve(
        TYPED, sinks=True, sliding_sinks=True, sliding_kv_factor=2, value_scale_key="attention_value_scale"
    ),
    "llama4_text": evolve(TYPED, absent={**NORMS_AFTER_ROTARY, **MIXED_AT_THE_INPUT}, score_terms=POSITION_FACTOR),
    "dbrx": evolve(
        LLAMA,
        norm="layer",
        norm_eps=1e-5,
        value_clip_key="attn_config.clip_qkv",
        roles={
            "attn": "norm_attn_norm.attn",
            "mlp_pre_norm": "norm_attn_norm.norm_2",
        },
    ),
    "afmoe": evolve(
        SANDWICH,
        windows="typed",
        qk_norm="head",
        attn_gate="separate",
        embedding_root=True,
        embedding_root_key="mup_enabled",
        embedding_scale_inside=False,
    ),
}
