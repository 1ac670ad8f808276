"""Tiny random checkpoints that vLLM's CPU kernels take: heads of 32, and what else each family needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as hf
from tiny_families import write

from interp_core import InterpModel

__all__ = ["FAMILIES", "NATIVE", "Loader", "PROMPTS", "THROUGH_TRANSFORMERS", "save"]

Loader = Callable[..., InterpModel]
"""``loaded(family, backend="vllm", **options)``."""

PROMPTS = [[5, 9, 11, 5, 77, 120, 42, 8, 200, 31], [7, 8], [3, 250, 17] * 9]

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "hidden_size": 96, "head_dim": 32}  # heads together are wider than the residual
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
_MIXED = {**_LAYERS, "query_pre_attn_scalar": 24}
_GPT2 = {"vocab_size": 300, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_WIDE, attention_bias=True, mlp_bias=True),
    "llama-one_key": lambda: hf.LlamaConfig(**{**_WIDE, "num_key_value_heads": 1}),
    "mistral": lambda: hf.MistralConfig(**_WIDE, sliding_window=None),
    "phi3": lambda: hf.Phi3Config(**_GROUPED, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_WIDE),
    "gemma": lambda: hf.GemmaConfig(**_WIDE, tie_word_embeddings=True),
    "gemma2": lambda: hf.Gemma2Config(
        **_WIDE, **_MIXED, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, tie_word_embeddings=True
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_WIDE, **_MIXED, tie_word_embeddings=True),
    "gpt2": lambda: hf.GPT2Config(**_GPT2, **_ENDS),
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **_WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**_WIDE, "intermediate_size": 96}, **_LAYERS, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZES),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(**_SIZES, use_parallel_residual=False),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "olmo": lambda: hf.OlmoConfig(**_GROUPED),
    "olmo3": lambda: hf.Olmo3Config(**_GROUPED, **_LAYERS),
    "starcoder2": lambda: hf.Starcoder2Config(**_GROUPED, sliding_window=None),
    "phi": lambda: hf.PhiConfig(**_SIZES),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED),
    "cohere": lambda: hf.CohereConfig(**_GROUPED, logit_scale=0.25),
    "cohere2": lambda: hf.Cohere2Config(**_WIDE, **_LAYERS),
    "granite": lambda: hf.GraniteConfig(
        **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.22, logits_scaling=4.0, attention_multiplier=0.1
    ),
    "glm": lambda: hf.GlmConfig(**_WIDE),
    "glm4": lambda: hf.Glm4Config(**_WIDE),
    "nemotron": lambda: hf.NemotronConfig(**_WIDE),
    "helium": lambda: hf.HeliumConfig(**_GROUPED, head_dim=32),
    "arcee": lambda: hf.ArceeConfig(**_WIDE),
    "exaone4": lambda: hf.Exaone4Config(**_GROUPED, **_LAYERS),
    "apertus": lambda: hf.ApertusConfig(**_GROUPED),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED),
    "ernie4_5": lambda: hf.Ernie4_5Config(**_WIDE),
    "seed_oss": lambda: hf.SeedOssConfig(**_WIDE),
}

NATIVE = [
    "llama",
    "llama-one_key",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
]
"""Families that vLLM's own classes serve."""

THROUGH_TRANSFORMERS = [name for name in FAMILIES if name not in ("gpt2",)]
"""Families that vLLM's Transformers backend serves, or that are refused by name."""


def save(family: str, root: Path) -> str:
    """The folder of a family's checkpoint, made at first use."""
    return write(FAMILIES[family], root / family)
