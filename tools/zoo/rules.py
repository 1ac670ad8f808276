"""How a configuration is made small, by the names of its fields: plain data.

The sizes differ from each other wherever the modelling code allows it, so that a mixed-up axis shows.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "DEPTH",
    "EXPERTS",
    "EXPERT_NEURONS",
    "HEADS",
    "HEAD_DIM",
    "KEPT_WHEN_UNSET",
    "KV_HEADS",
    "NEURONS",
    "PROMPT",
    "ENLARGED",
    "SIZES",
    "SPECIAL_IDS",
    "VALUE_DIM",
    "VOCAB",
    "WIDTH",
    "WINDOW",
]

WIDTH: Final = 64
DEPTH: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 16
VALUE_DIM: Final = 12
NEURONS: Final = 96
EXPERTS: Final = 6
EXPERT_NEURONS: Final = 48
VOCAB: Final = 256
WINDOW: Final = 8
_POSITIONS: Final = 128

PROMPT: Final = (5, 9, 11, 5, 77, 120, 42, 8, 199, 31, 64, 17, 150)
"""Longer than every window, with a token twice, and no special id."""

SPECIAL_IDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")

_NAMES: Final[tuple[tuple[Any, str], ...]] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embed_dim d_embed dim_model embedding_size embedding_dim lru_width "
        "word_embed_proj_dim encoder_hidden_size decoder_hidden_size",
    ),
    (
        DEPTH,
        "num_hidden_layers num_layers n_layer n_layers depth decoder_layers encoder_layers num_decoder_layers layers "
        "num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers",
    ),
    (
        HEADS,
        "num_attention_heads num_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads decoder_num_attention_heads",
    ),
    (KV_HEADS, "num_key_value_heads num_kv_heads decoder_num_key_value_heads"),
    (HEAD_DIM, "head_dim attention_head_dim attention_head_size d_head kv_channels"),
    (VALUE_DIM, "v_head_dim"),
    (
        NEURONS,
        "intermediate_size ffn_dim ffn_hidden_size n_inner inner_dim d_ff dim_ff decoder_ffn_dim encoder_ffn_dim "
        "num_decoder_ffn_dim num_encoder_ffn_dim mlp_hidden_size intermediate_size_mlp shared_intermediate_size "
        "shared_expert_intermediate_size",
    ),
    (EXPERT_NEURONS, "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts num_routed_experts moe_num_experts"),
    (
        2,
        "num_experts_per_tok top_k top_k_experts moe_topk moe_k num_selected_experts experts_per_token "
        "linear_num_key_heads index_n_heads num_kv_shared_layers",
    ),
    (
        1,
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups n_groups "
        "first_k_dense_replace moe_layer_start_index",
    ),
    (0, "num_nextn_predict_layers"),
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (
        _POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length max_sequence_length "
        "max_target_positions max_source_positions",
    ),
    (
        WINDOW,
        "sliding_window window_size local_window_size swa_window_size attention_window_size attention_chunk_size",
    ),
    (24, "q_lora_rank"),
    (20, "kv_lora_rank"),
    (8, "qk_rope_head_dim qk_nope_head_dim"),
    (16, "linear_key_head_dim linear_value_head_dim index_head_dim mamba_d_head mamba_head_dim"),
    (16, "hidden_size_per_layer_input"),
    (4, "linear_num_value_heads index_topk"),
    (8, "mamba_d_state ssm_state_size state_size mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank"),
    (8, "chunk_size mamba_chunk_size mamba2_chunk_size"),
    (128, "mamba_d_ssm"),
    (28, "image_size"),
    (14, "patch_size"),
)

SIZES: Final[dict[str, Any]] = {
    **{name: value for value, names in _NAMES for name in names.split()},
    **dict(zip(SPECIAL_IDS, range(4), strict=True)),
}
"""Field name to small value, for every configuration that has the field."""

KEPT_WHEN_UNSET: Final = frozenset({"head_dim", "lru_width", "num_key_value_heads", "n_inner"})
"""Fields that are given a size although the family's default leaves them open; others are left open too."""

ENLARGED: Final = (
    "q_proj k_proj qkv query_key_value Wqkv c_attn q_b_proj kv_b_proj query key q_a_proj in_proj_qkv gate router "
    "modality_router prediction_coefs correction_coefs block_inject_weight"
).split()
"""Modules whose weights are enlarged: attention, routing and how streams are mixed then differ from token to token as
in a trained model."""
