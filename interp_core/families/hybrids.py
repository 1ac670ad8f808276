"""State spaces, recurrences and convolutions, learned residuals, and trunks without a plain list of blocks."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from interp_core.contributions import Contributions, Weights
from interp_core.families.bases import (
    ALONE,
    GEMMA4,
    GPT2,
    GRANITE,
    LAYER_NORM,
    LLAMA,
    MAMBA,
    POST_NORM,
    PROMPT_SLOTS,
    SHARED_BLOCK,
    SLIDING,
    TYPED,
)
from interp_core.family import Absence, FamilyFacts

__all__ = ["ROWS"]

ROWS: Final[dict[str, FamilyFacts]] = {
    # State spaces, convolutions and attention in one trunk
    "lfm2": evolve(TYPED, qk_norm="head"),
    "lfm2_moe": evolve(TYPED, qk_norm="head"),
    "jamba": evolve(TYPED, positions="none"),
    "bamba": TYPED,
    # A recurrence in place of attention, and an MLP whose output has a gate. Its first block begins with a norm.
    "rwkv": evolve(
        LAYER_NORM,
        positions="none",
        activation="relu2",
        embedding_norm=True,
        halved_every_key="rescale_every",
        roles={
            "block_in": "pre_ln",
            "attn.o_proj": "attention.output",
            "mlp.up_proj": "feed_forward.key",
            "mlp.down_proj": "feed_forward.value",
            "mlp_pre_norm": "ln2",
        },
    ),
    "falcon_h1": FamilyFacts(
        embedding_scale_inside=False,
        logit_multiplier_keys=("lm_head_multiplier",),
        second_mixer="state_space",
        roles={"attn.beside": "mamba"},
        contributions=Contributions(attn_terms=("attn.beside", "attn")),
        factor_keys={
            "attn.beside": "ssm_out_multiplier",
            "attn": "attention_out_multiplier",
            "mlp.gate_proj": "mlp_multipliers.0",
        },
    ),
    "granitemoehybrid": evolve(
        GRANITE,
        windows="typed",
        positions="",
        rotary_if=("position_embedding_type", "rope"),
        d_mlp_keys=("shared_intermediate_size",),
        roles={"mlp": "block_sparse_moe shared_mlp"},
    ),
    "kimi_linear": evolve(TYPED, positions="none"),
    "olmo_hybrid": evolve(
        POST_NORM,
        qk_norm="full",
        windows="typed",
        positions="",
        mixer_norms={"linear_attention": ("attn_pre_norm", "mlp_pre_norm")},
    ),
    "recurrent_gemma": FamilyFacts(
        windows="typed",
        embedding_root=True,
        embedding_rounded=True,
        embedding_scale_inside=False,
        final_softcap=True,
    ),
    "zamba": SHARED_BLOCK,
    "zamba2": evolve(SHARED_BLOCK, positions="", rotary_if=("use_mem_rope", True)),
    # The residual that a sublayer is added to is the sublayer's own normed input, times a factor
    "minimax": evolve(
        TYPED,
        contributions=Contributions(attn_skip="normed", mlp_skip="normed"),
        requires={"sliding_window": None},
        factor_keys={
            "attn": {"full_attention": "full_attn_beta_factor", "linear_attention": "linear_attn_beta_factor"},
            "attn_skip": {"full_attention": "full_attn_alpha_factor", "linear_attention": "linear_attn_alpha_factor"},
            "mlp": "mlp_beta_factor",
            "mlp_skip": "mlp_alpha_factor",
        },
    ),
    # Learned weights on the residual
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "doge": evolve(
        SLIDING,
        qk_norm="head",
        score_terms="a mask that attention computes from its values",
        contributions=Contributions(
            attn_skip="learned",
            mlp_skip="learned",
            weights={
                "attn_skip": Weights("block", "input_residual"),
                "mlp_skip": Weights("block", "post_attention_residual"),
            },
        ),
        absent_in=(
            Absence(
                ["router_logits", "expert_weights", "expert_indices"],
                "experts are the pairs of two halves of a key, and no module gives a logit or a weight for each",
                mlp="sparse",
            ),
        ),
    ),
    "zaya": evolve(
        TYPED,
        qk_norm="head",
        embedding_learned=True,
        roles={
            "attn.split": "self_attn.qkv_proj",
            "attn.qk_norm": "self_attn.qk_norm",
            "attn_join": "post_attention_residual_scale",
            "mlp_join": "post_mlp_residual_scale",
        },
        contributions=Contributions(
            attn_skip="learned",
            mlp_skip="learned",
            weights={
                "attn": Weights("attn_join", "hidden_states_scale", "hidden_states_bias"),
                "mlp": Weights("mlp_join", "hidden_states_scale", "hidden_states_bias"),
                "attn_skip": Weights("attn_join", "residual_scale", "residual_bias"),
                "mlp_skip": Weights("mlp_join", "residual_scale", "residual_bias"),
            },
        ),
    ),
    # Short convolutions behind the sublayers, and inside attention
    "inkling_text": evolve(
        TYPED,
        qk_norm="head",
        head_divisor_key="logits_mup_width_multiplier",
        score_terms="a learned bias by distance, and a factor by position",
        attn_scale_of=lambda width: 1.0 / width,
        roles={"attn_post": "attn_sconv", "mlp_post": "mlp_sconv", "attn.v_proj": "self_attn.v_sconv"},
    ),
    # No list of blocks that each run once on the tokens of a prompt
    "hrm_text": evolve(
        LLAMA,
        attn_gate="separate",
        embedding_scale_inside=False,
        absent={
            "layers": "two stacks run in a loop, each block several times in a forward, so it has no one tensor",
            "final_norm": "the norm behind a stack runs several times in a forward, so it has no one output",
        },
    ),
    "xlm": evolve(
        GPT2,
        final_norm=False,
        causal_keys={"causal": True},
        absent={"layers": "the parts of a layer stand in four lists of the trunk, and no module is a block"},
    ),
    "cpmant": evolve(
        LLAMA,
        positions="other",
        causal=False,
        rereads=True,
        absent={
            "layers": PROMPT_SLOTS,
            "final_norm": PROMPT_SLOTS,
            "embeddings": PROMPT_SLOTS,
        },
    ),
    "reformer": evolve(
        LAYER_NORM,
        positions="other",
        absent=dict.fromkeys(
            ("layers", "final_norm", "embeddings", "lm_head"),
            "each forward hashes by random rotations of its own, so that it cannot be repeated, and nothing that it "
            "computes can be held against anything; and it carries two residuals",
        ),
    ),
    # State spaces, attention, MLPs and experts, each alone in a block
    "nemotron_h": ALONE,
    "xlstm": FamilyFacts(
        positions="none",
        final_softcap=True,
        roles={
            "attn": "mlstm_layer",
            "attn.o_proj": "mlstm_layer.out_proj",
            "mlp_pre_norm": "norm_ffn",
            "mlp.gate_proj": "ffn.proj_up_gate",
            "mlp.up_proj": "ffn.proj_up",
            "mlp.gate_up_proj": "ffn.proj_up_gate_z",
            "mlp.down_proj": "ffn.proj_down",
        },
    ),
    # State spaces alone: one sublayer per block
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "falcon_mamba": MAMBA,
}
