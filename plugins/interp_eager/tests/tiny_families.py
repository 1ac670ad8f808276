"""Tiny random checkpoints of each family: constant parameters are perturbed, so that no identity holds trivially."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

__all__ = ["FAMILIES", "PROMPT", "save", "write"]

PROMPT = [5, 9, 11, 5, 77, 120, 42, 8, 200, 31]

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 16}  # four heads of 16 are wider than the 48 of the residual
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "query_pre_attn_scalar": 8}
_GPT2 = {"vocab_size": 300, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 0}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 4.0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_WIDE, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_WIDE),
    "mistral": lambda: hf.MistralConfig(**_WIDE, sliding_window=4),
    "gemma2": lambda: hf.Gemma2Config(**_WIDE, **_MIXED, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": lambda: hf.Gemma3TextConfig(**_WIDE, **_MIXED),
    "gpt2": lambda: hf.GPT2Config(**_GPT2, eos_token_id=1),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZES),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(**_SIZES, use_parallel_residual=False),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "granite": lambda: hf.GraniteConfig(**_GROUPED, **_MULTIPLIERS, attention_multiplier=0.1),
    "cohere": lambda: hf.CohereConfig(**_GROUPED, logit_scale=0.25),
    "phi3": lambda: hf.Phi3Config(**_GROUPED),
    "starcoder2": lambda: hf.Starcoder2Config(**_GROUPED, sliding_window=4),
}


def save(family: str, root: Path) -> str:
    """The folder of a family's checkpoint, made at first use."""
    return write(FAMILIES[family], root / family)


def write(
    config: Callable[[], Any],
    folder: Path,
    auto: Any = hf.AutoModelForCausalLM,
    spread: Callable[[str, torch.Tensor], None] | None = None,
) -> str:
    """A checkpoint of a random model, unless the folder is there; ``spread`` changes parameters in place."""
    if folder.is_dir():
        return str(folder)
    torch.manual_seed(0)
    model = auto.from_config(config(), attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    stored = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, parameter in stored.items():
            if spread is not None:
                spread(name, parameter)
            if not parameter.is_floating_point():
                continue
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn", "query_key_value", "q_b", "kv_b")):
                parameter.mul_(8.0)  # so that scores are large enough for softcaps and windows to matter
    model.save_pretrained(folder)
    return str(folder)
