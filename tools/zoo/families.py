"""What single families need beyond the rules by field name: plain data, by ``model_type``, inner ones too.

Most entries switch on what the family's defaults leave at 1 or off (multipliers, softcaps, mixtures of layer
types), so that an identity that passes it over fails.
"""

from __future__ import annotations

from typing import Any, Final

from zoo.rules import DEPTH, EXPERT_NEURONS, EXPERTS, HEAD_DIM, HEADS, KV_HEADS, NEURONS, WIDTH, WINDOW

__all__ = ["CONFIGS", "EXTRA_KEYS", "UNBUILDABLE"]

_WINDOWS: Final = ["sliding_attention", "full_attention"] * 2
_LINEAR: Final = ["linear_attention", "full_attention"] * 2
_WINDOWED: Final = {"layer_types": _WINDOWS}
_HYBRID: Final = {"layer_types": _LINEAR}
_SWITCHED: Final = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _WINDOWS}
_ZAMBA: Final = ["linear_attention", "hybrid"] * 2
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_TWO_ROPES: Final = {"sliding_attention": _ROPE, "full_attention": _ROPE}
_DENSE_FIRST: Final = ["dense", "sparse", "sparse", "sparse"]


def _each(names: str, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), values)


def _merged(*tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        for name, values in table.items():
            found[name] = found.get(name, {}) | values
    return found


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, "mrope_section": list(sizes), **more}}


_MULTIPLIERS: Final = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.1,
}
_CAPS: Final = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_GEMMA4: Final = {"layer_types": _WINDOWS, "per_layer_config": {}, "rope_parameters": _TWO_ROPES}
_GEMMA4_EXPERTS: Final = {"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 32}
_QWEN_VL: Final = _sections(2, 3, 3)
_GLM_VL: Final = _sections(2, 1, 1, partial_rotary_factor=0.5)

_SCALARS: Final[dict[str, dict[str, Any]]] = {
    **_each(
        "granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax granite4_vision_text",
        _MULTIPLIERS,
    ),
    "granitemoehybrid": {
        **_MULTIPLIERS,
        "layer_types": _LINEAR,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_chunk_size": 8,
    },
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": {"layer_types": _WINDOWS, "logit_scale": 0.25},
    "cohere2_moe": {"layer_types": _WINDOWS, "logit_scale": 0.25},
    "gemma2": {**_CAPS, "layer_types": _WINDOWS, "query_pre_attn_scalar": 8},
    "vaultgemma": {**_CAPS, "layer_types": _WINDOWS},
    "gemma3_text": {"layer_types": _WINDOWS, "query_pre_attn_scalar": 8},
    "minicpm3": {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 32},
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.9,
        "key_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.7],
    },
    "nanochat": {"final_logit_softcapping": 3.0},
}
"""Multipliers and softcaps that are not 1."""

_MIXTURES: Final[dict[str, dict[str, Any]]] = {
    **_each("gpt_oss olmo3 exaone4 exaone_moe ministral", _WINDOWED),
    **_each("qwen2 qwen3", _SWITCHED),
    "qwen2_moe": {**_SWITCHED, "mlp_only_layers": [0]},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "mlp_only_layers": [0]},
    **_each("starcoder2 phi3 phimoe mixtral", {"sliding_window": WINDOW}),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "modernbert-decoder": {**_WINDOWED, "local_attention": 2 * WINDOW},
    "gemma3n_text": {
        "layer_types": _WINDOWS,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0, 0.5, 0.0],
        "intermediate_size": [NEURONS] * DEPTH,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": {**_GEMMA4, **_GEMMA4_EXPERTS, "num_kv_shared_layers": 2, "enable_moe_block": True},
    "gemma4_unified_text": _GEMMA4,
    "diffusion_gemma_text": {**_GEMMA4, **_GEMMA4_EXPERTS},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {"layer_types": _LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "minimax": {
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "block_size": 4,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.9,
        "full_attn_alpha_factor": 1.1,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "olmo_hybrid": {"layer_types": _LINEAR},
    **_each("qwen3_next qwen3_5_text qwen3_5_moe_text", _HYBRID),
    "zamba": {"layers_block_type": _ZAMBA, "n_mamba_heads": 2, "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": _ZAMBA, "n_mamba_heads": 8, "mamba_ngroups": 1},
    "step3p5": {
        "sliding_window": WINDOW,
        "layer_types": _WINDOWS,
        "num_sliding_attention_heads": 4,
        "moe_intermediate_size": EXPERT_NEURONS,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
        "num_hashes": 1,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "feed_forward_size": NEURONS,
    },
}
"""More than one kind of layer."""

_WIDE_HEADS: Final = {"head_dim": HEAD_DIM + 8}

_STREAMS: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 2,
        "hc_mult": 3,
    },
    "hy_v4": {"indexer_types": ["full", "shared"] * 2, "num_key_value_heads": HEADS},
    "glm5_next_text": {
        "num_key_value_heads": HEADS,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "head_dim": 0,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "index_kpool": 2,
        "index_topk": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": _DENSE_FIRST,
    },
    "qwen4_exp_text": {
        "layer_types": _LINEAR,
        "hc_lowrank": 8,
        "hc_count": 3,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 101,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "rope_parameters": {
            **_ROPE,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}
"""Several residual streams."""

_SHAPES: Final[dict[str, dict[str, Any]]] = {
    **_each("llama mistral glm4 arcee", _WIDE_HEADS),
    **_each("phi persimmon stablelm", {"qk_layernorm": True}),
    "glm4_moe": {"use_qk_norm": True},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": NEURONS, "hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2, "num_layers": 2, "num_key_value_heads": HEADS},
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": KV_HEADS,
        "swa_head_dim": HEAD_DIM,
        "sliding_window_size": WINDOW,
        "d_rel": 4,
        "rel_extent": 32,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    "xlstm": {"chunk_size": 8, "v_dim_factor": 1.0, "qk_dim_factor": 1.0, "num_heads": 4},
    "big_bird": {"attention_type": "original_full"},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "blt": {"encoder_hash_byte_group_vocab": 300, "encoder_hash_byte_group_size": [3, 4]},
    "blt_local_encoder": {"hidden_size_global": 2 * WIDTH},
    "blt_local_decoder": {"hidden_size_global": 2 * WIDTH},
    "blt_global_transformer": {"hidden_size": 2 * WIDTH},
    "chameleon": {"vocabulary_map": {"<image>": 250, **{f"IMGIMG{c * 3}Z": 200 + i for i, c in enumerate("ABCDEFGH")}}},
    "emu3": {
        "vocabulary_map": {
            "<image>": 250,
            "<|extra_200|>": 251,
            **{f"<|visual token {i:06d}|>": 200 + i for i in range(8)},
        }
    },
    "deepseek_ocr2_text": {"mlp_layer_types": _DENSE_FIRST, "num_experts_per_tok": 2},
    "granite4_vision": {
        "text_config": "granite4_vision_text",
        "deepstack_layer_map": [[-1, 1]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
}
"""Sizes that no rule by name can know. A text for an inner configuration is its ``model_type``."""

_CONFORMER: Final = {"hidden_dim": WIDTH, "dim_head": 8, "num_layers": 2, "context_size": 16}

_ENCODERS: Final[dict[str, dict[str, Any]]] = {
    "radio": {"video_temporal_patch_size": 2, "hidden_size": WIDTH, "num_hidden_layers": 2},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 64},
    "janus_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "latent_channels": 32,
        "num_embeddings": 64,
        "projection_dim": WIDTH,
        "image_token_embed_dim": WIDTH,
    },
    "janus_vision_model": {"projection_dim": WIDTH},
    "florence_vision": {
        "depths": [1] * 4,
        "embed_dim": [8, 16, 32, WIDTH],
        "num_heads": [2] * 4,
        "num_groups": [2] * 4,
        "projection_dim": WIDTH,
    },
    **_each("granite_speech_encoder granite_speech_plus_encoder", _CONFORMER),
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": WIDTH // 4}
    },
    **_each("qwen2_5_omni_thinker qwen3_omni_moe_thinker", {"vision_start_token_id": 210}),
    "kyutai_speech_to_text": {"num_codebooks": 2, "codebook_vocab_size": 32, "audio_pad_token_id": 3},
    "mimi": {"upsample_groups": WIDTH},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": WIDTH},
    "diffusion_gemma": {"vision_config": "gemma4_vision"},
}
"""What stands before the text model of a wrapper."""

_ROTARY: Final[dict[str, dict[str, Any]]] = {
    **_each("qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text paddleocr_vl_text", _QWEN_VL),
    **_each("glm_ocr_text cosmos3_edge_text", _QWEN_VL),
    **_each("glm4v_text glm4v_moe_text", _GLM_VL),
    "hunyuan_vl_text": _sections(2, 2, 2, 2),
    "ernie4_5_vl_moe_text": {
        **_sections(3, 3, 2),
        "moe_intermediate_size": [48, 24],
        "mlp_layer_types": _DENSE_FIRST,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 3, 3]} for kind in ("full_attention", "sliding_attention")
        }
    },
}
"""Rotary sections that fit the small heads."""

CONFIGS: Final = _merged(_SCALARS, _MIXTURES, _STREAMS, _SHAPES, _ENCODERS, _ROTARY)
"""Values of configuration fields by ``model_type``, on top of the rules."""

EXTRA_KEYS: Final = frozenset({"per_layer_config", "vision_start_token_id"})
"""What checkpoints state and modelling code reads, though it is no field of the configuration's class."""

_TIMM: Final = "its vision tower is built by timm, which nothing else here needs"
_DRAFT: Final = "a draft head, which reads the keys and values of another model and has no vocabulary of its own"

UNBUILDABLE: Final[dict[str, str]] = {
    **dict.fromkeys(("gemma3n", "mm:fast_vlm", "mm:perception_lm"), _TIMM),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT),
    "mm:vision-encoder-decoder": "an image encoder and a text decoder of one's choice, without a configuration",
    "mm:qwen3_omni_moe": "three models that speak, of which mm:qwen3_omni_moe_thinker is the one that runs on text",
}
"""Names that cannot be built, with the reason; a name here that builds after all fails the run."""
