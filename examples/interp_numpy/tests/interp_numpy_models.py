"""Tiny random checkpoints of every shape that the backend runs, and of some that it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from interp_core.testing import write_checkpoint

__all__ = ["OTHERS", "PROMPT", "SERVED", "write"]

PROMPT = [5, 9, 11, 5, 77, 120, 42, 8, 200, 31, 64, 7]

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_WIDE = {**_SIZES, "head_dim": 16}  # four heads of 16 are wider than the 48 of the residual
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

SERVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_WIDE, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: hf.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-llama3": lambda: hf.LlamaConfig(**_WIDE, rope_parameters=_LLAMA3),
    "llama-linear": lambda: hf.LlamaConfig(**_WIDE, rope_parameters=_LINEAR),
    "mistral": lambda: hf.MistralConfig(**_WIDE, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**_SIZES),
}

OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3": (lambda: hf.Qwen3Config(**_WIDE), "qk_norm is 'head'"),
    "mistral-window": (lambda: hf.MistralConfig(**_WIDE, sliding_window=4), "window is 4"),
    "gemma2": (lambda: hf.Gemma2Config(**_WIDE), "attn_post_norm is True"),
    "gpt_neox": (lambda: hf.GPTNeoXConfig(**_SIZES), "norm is 'layer'"),
    "mixtral": (lambda: hf.MixtralConfig(**_SIZES, num_local_experts=4), "mlp is 'sparse'"),
    "granite": (lambda: hf.GraniteConfig(**_SIZES, residual_multiplier=0.2), "residual_multiplier is 0.2"),
    "helium": (lambda: hf.HeliumConfig(**_WIDE), "this is 'helium'"),  # the same blocks, rotated in pairs
}
"""Configuration, and what is said of it."""


def write(name: str, folder: Path) -> Path:
    """A checkpoint of that name below ``folder``, made at first use."""
    path = folder / name
    if not path.is_dir():
        write_checkpoint(SERVED[name](), path)
    return path


def saved_again(path: Path, target: Path, *, dtype: Any = torch.float32, shard: str = "1GB") -> Path:
    """A copy of a checkpoint in another dtype, or in several files."""
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.save_pretrained(target, max_shard_size=shard)
    return target
