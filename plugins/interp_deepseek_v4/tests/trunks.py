"""Tiny random checkpoints of the trunks that this package describes, and of one conventional decoder beside them.

Weights are large enough for every sublayer to matter, and the coefficients of the streams (collapse, write, mix) span
a real range, so that no identity holds because a tensor is constant, zero or the unit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers as hf

__all__ = ["LAYER_TYPES", "PROMPT", "RATES", "SMALL_RATES", "TRUNKS", "WINDOW", "ids_of", "save", "small_config"]

VOCAB: Final = 200
WINDOW: Final = 8
LAYER_TYPES: Final = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]
SMALL_RATES: Final = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
RATES: Final = [None, 4, 8, 4]


def ids_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(5, VOCAB, (length,), generator=generator)]


PROMPT: Final = ids_of(21)
"""Long enough for five entries of four tokens, two of eight, and two windows, with a token left over."""

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
_LATENT: Final[dict[str, Any]] = {"q_lora_rank": 24, "kv_lora_rank": 20, "v_head_dim": 16, "num_key_value_heads": 4}
# Scores of an indexer are sums over heads of products cut off at zero. With few heads, exact ties at zero are common,
# and a run with a cache may then choose other entries than a run without one, in transformers as here.
_INDEXER: Final[dict[str, Any]] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 12}
_ONE_DENSE: Final = ["dense", "sparse", "sparse", "sparse"]


def small_config(**changed: Any) -> Any:
    """DeepSeek-V4, every kind of layer once, the first one routed by a table; small rates, so that entries are many."""
    values: dict[str, Any] = {
        **_SIZES,
        **_EXPERTS,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        **_INDEXER,
        "index_topk": 3,
        "sliding_window": WINDOW,
        "hc_mult": 4,
        "swiglu_limit": 1.0,
        "num_nextn_predict_layers": 0,
        "layer_types": LAYER_TYPES,
        "compress_rates": SMALL_RATES,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    }
    return hf.DeepseekV4Config(**{**values, **changed})


def _glm5_next() -> Any:
    text = {
        **_SIZES,
        **_EXPERTS,
        **_LATENT,
        **_INDEXER,
        "model_type": "glm5_next_text",
        "intermediate_size": 96,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "index_kpool": 2,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": _ONE_DENSE,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "out_hidden_size": 64,
        "projection_intermediate_size": 16,
    }
    return hf.Glm5NextConfig(text_config=text, vision_config=vision)


def _hy_v4() -> Any:
    return hf.HYV4Config(
        **_SIZES,
        **_EXPERTS,
        **_LATENT,
        **_INDEXER,
        intermediate_size=96,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        layer_types=["indexed_attention"] * 4,
        indexer_types=["full", "shared"] * 2,
        mlp_layer_types=_ONE_DENSE,
    )


def _qwen4_exp() -> Any:
    return hf.Qwen4ExpTextConfig(
        **{**_SIZES, "pad_token_id": None},
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
        indexer_head_dim=16,
        indexer_kv_heads=1,
        indexer_n_heads=12,
        layer_types=["linear_attention", "indexed_attention"] * 2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        hc_count=4,
        hc_lowrank=8,
        ple_layer_ids=[3],  # Counted from 1.
        ple_embed_dim=32,
        ngram_vocab_size_base=101,
        make_ngram_vocab_size_divisible_by=8,
        heads_per_ngram=2,
        split_ngram_parts=1,
    )


def _gemma3n() -> Any:
    return hf.Gemma3nTextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0, 0.0, 0.5, 0.0],
        altup_num_inputs=3,
        altup_active_idx=0,
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=3.0,
    )


def _llama() -> Any:
    return hf.LlamaConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2)


TRUNKS: Final[dict[str, Callable[[], Any]]] = {
    "deepseek_v4": small_config,
    "glm5_next": _glm5_next,
    "hy_v4": _hy_v4,
    "qwen4_exp_text": _qwen4_exp,
    "gemma3n_text": _gemma3n,
}

_SPREAD: Final = {
    "hc.fn": 0.1,
    "hc_head.hc_fn": 0.1,
    "input_mix_weight_down": 0.1,
    "input_mix_weight_up": 1.0,
    "block_inject_weight": 0.3,
    "modality_router": 6.0,  # Behind a division by the width.
    "prediction_coefs": 0.5,
    "correction_coefs": 0.5,
    "embed_tokens": 1.0,
}
"""Standard deviations of weights that coefficients come from; other matrices keep the size of what they read."""


def save(name: str, root: Path, **changed: Any) -> str:
    """The folder of a trunk's checkpoint (or of a plain ``"llama"``'s), made at first use.

    ``changed`` values of the configuration make another one, of DeepSeek-V4 only.
    """
    folder = root / (f"{name}-changed" if changed else name)
    if folder.is_dir():
        return str(folder)
    config = small_config(**changed) if changed else {**TRUNKS, "llama": _llama}[name]()
    auto = hf.AutoModelForImageTextToText if name == "glm5_next" else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config).float().eval()
    _randomise(model, torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def _randomise(model: Any, generator: torch.Generator) -> None:
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        spread = next((s for part, s in _SPREAD.items() if part in name), None)
        if parameter.dim() >= 2:
            own = parameter.shape[-1] ** -0.5
            scaled_inside = tied and "embed_tokens" in name
            parameter.copy_(noise * (own if spread is None or scaled_inside else spread))
        elif name.endswith((".base", ".hc_base", ".sinks")):
            parameter.copy_(0.5 * noise)
        elif name.endswith((".scale", ".hc_scale")):
            parameter.copy_(1.0 + 0.2 * noise)
        elif bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.2 * noise)  # Gains of norms and biases, which begin as ones or zeros.
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            rows = [torch.randperm(4, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
            buffer.copy_(torch.stack(rows))
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
