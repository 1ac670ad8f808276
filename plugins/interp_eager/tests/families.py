"""More tiny random checkpoints: of families whose parts are kept in other ways than those of ``tiny_families``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_families
import transformers as hf
from older_families import OLDER
from tiny_families import _GROUPED, _MIXED, _SIZES, _WIDE

__all__ = ["FAMILIES", "save"]

_LAYERS = {"sliding_window": 4, "layer_types": _MIXED["layer_types"]}
_OLD = {"vocab_size": 300, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1}
_FALCON = {
    **{k: v for k, v in _SIZES.items() if k != "intermediate_size"},
    "ffn_hidden_size": 80,
    "alibi": False,
    "bias": True,
}
_VISION = {
    "image_size": 16,
    "patch_size": 8,
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
}
_IMAGE_TOKENS = {"mm_tokens_per_image": 4, "boi_token_id": 297, "eoi_token_id": 298, "image_token_id": 299}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DECODER = {"vocab_size": 300, "num_attention_heads": 4, "max_position_embeddings": 64}

MORE: dict[str, Callable[[], Any]] = {
    **OLDER,
    "apertus": lambda: hf.ApertusConfig(**_GROUPED),
    "arcee": lambda: hf.ArceeConfig(**_WIDE),
    "biogpt": lambda: hf.BioGptConfig(**_SIZES),
    "codegen": lambda: hf.CodeGenConfig(**_OLD, **_ENDS, n_ctx=64, rotary_dim=8),
    "cohere-qk_norm": lambda: hf.CohereConfig(**_GROUPED, logit_scale=0.25, use_qk_norm=True),
    "cohere2": lambda: hf.Cohere2Config(**_WIDE, **_LAYERS),
    "exaone4": lambda: hf.Exaone4Config(**_GROUPED, **_LAYERS),
    "falcon-many_keys": lambda: hf.FalconConfig(**_FALCON, multi_query=False),
    "falcon-new": lambda: hf.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-one_key": lambda: hf.FalconConfig(**_FALCON),
    "falcon-sequential": lambda: hf.FalconConfig(**_FALCON, parallel_attn=False, multi_query=False),
    "gemma": lambda: hf.GemmaConfig(**_WIDE),
    "gemma3-wrapper": lambda: hf.Gemma3Config(text_config={**_WIDE, **_MIXED}, vision_config=_VISION, **_IMAGE_TOKENS),
    "glm": lambda: hf.GlmConfig(**_WIDE),
    "glm4": lambda: hf.Glm4Config(**_WIDE),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**_OLD, **_ENDS),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **_ENDS,
        vocab_size=300,
        hidden_size=48,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        max_position_embeddings=64,
    ),
    "gptj": lambda: hf.GPTJConfig(**_OLD, **_ENDS, rotary_dim=8),
    "helium": lambda: hf.HeliumConfig(**_GROUPED, head_dim=12),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(
        **_GROUPED, use_post_norm=True, residual_multiplier=0.3, logits_scaling=0.5
    ),
    "jais2": lambda: hf.Jais2Config(**_WIDE),
    "llama-one_key": lambda: hf.LlamaConfig(**{**_WIDE, "num_key_value_heads": 1}),
    "nemotron": lambda: hf.NemotronConfig(**_WIDE),
    "olmo": lambda: hf.OlmoConfig(**_GROUPED),
    "olmo3": lambda: hf.Olmo3Config(**_GROUPED, **_LAYERS),
    "bitnet": lambda: hf.BitNetConfig(**_GROUPED),
    "cohere_compass": lambda: hf.CohereCompassTextConfig(
        **_GROUPED, **_LAYERS, logit_scale=0.25, rope_parameters={"full_attention": None, "sliding_attention": _MROPE}
    ),
    "deepseek_v32": lambda: hf.DeepseekV32Config(
        **_SIZES,
        **_LATENT,
        **_EXPERTS,
        index_n_heads=24,
        index_head_dim=16,
        index_topk=4,
        mlp_layer_types=["dense"] * 4,
    ),
    "diffllama": lambda: hf.DiffLlamaConfig(**_GROUPED),
    "hunyuan": lambda: hf.HunYuanDenseV1Config(**_WIDE),
    "ministral3": lambda: hf.Ministral3Config(
        **_WIDE,
        sliding_window=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 4,
        },
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(**_SIZES, **_LATENT, scale_emb=3.0, scale_depth=1.4, dim_model_base=16),
    "nanochat": lambda: hf.NanoChatConfig(**_GROUPED, final_logit_softcapping=3.0),
    "opt": lambda: hf.OPTConfig(**_DECODER, hidden_size=48, ffn_dim=80, num_hidden_layers=4, word_embed_proj_dim=48),
    "persimmon": lambda: hf.PersimmonConfig(**_SIZES, qk_layernorm=True),
    "phi": lambda: hf.PhiConfig(**_SIZES, qk_layernorm=True),
    "qwen2-windows": lambda: hf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED, **_HALF, qk_layernorm=True),
    "stablelm-parallel": lambda: hf.StableLmConfig(**_GROUPED, **_HALF, use_parallel_residual=True),
    "vaultgemma": lambda: hf.VaultGemmaConfig(**_WIDE, **_MIXED, attn_logit_softcapping=2.0),
    "xglm": lambda: hf.XGLMConfig(
        vocab_size=300, d_model=48, ffn_dim=80, num_layers=4, attention_heads=4, max_position_embeddings=64
    ),
}

FAMILIES = sorted({*MORE, *tiny_families.FAMILIES})


def save(family: str, root: Path) -> str:
    """The folder of a family's checkpoint, made at first use."""
    if family in tiny_families.FAMILIES:
        return tiny_families.save(family, root)
    auto = hf.AutoModelForImageTextToText if family.endswith("-wrapper") else hf.AutoModelForCausalLM
    return tiny_families.write(MORE[family], root / family, auto)
