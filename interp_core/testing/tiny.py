"""Tiny random models of a few conventional families, made with transformers, for backends that read its checkpoints.

Nothing in them is constant, zero or the unit: norms have random gains and biases, scores are large enough for softcaps
and windows to matter. No identity holds on them because a parameter has the value that makes a mistake invisible.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

__all__ = ["FAMILIES", "PROMPT", "Family", "write_checkpoint", "write_family"]

PROMPT: Final = (5, 9, 11, 5, 77, 120, 42, 8, 200, 31, 64, 7)
"""Twelve ids, one of them twice, none special: for every model with a vocabulary of more than 200."""

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Heads of 32, which compiled attention kernels take; four of them are wider than the residual.
_GROUPED: Final = {**_SIZES, "num_key_value_heads": 2, "head_dim": 32}
_TYPES: Final = ["sliding_attention", "full_attention"]


@frozen(kw_only=True)
class Family:
    """How to make one family's tiny model, and where its tensors are in transformers' own module tree.

    Attributes:
        config: name of transformers' configuration class.
        values: what it is given.
        blocks: path of the list of blocks.
        modules: point to path within a block and side (``in`` or ``out``), for points that are a module's end.
        final_norm: path of the final norm.
    """

    config: str
    values: Mapping[str, Any]
    blocks: str = "model.layers"
    modules: Mapping[str, tuple[str, str]]
    final_norm: str = "model.norm"


_ENDS: Final = {
    "resid_pre": ("", "in"),
    "resid_post": ("", "out"),
    "attn_in": ("self_attn", "in"),
    "z": ("self_attn.o_proj", "in"),
    "attn_out": ("self_attn.o_proj", "out"),
    "mlp_in": ("mlp", "in"),
    "mlp_out": ("mlp", "out"),
    "value": ("self_attn.v_proj", "out"),
}
_PRE_NORM: Final = {
    "resid_mid": ("post_attention_layernorm", "in"),
    "attn_out_post": ("self_attn", "out"),
    "mlp_out_post": ("mlp", "out"),
}
_GATED: Final = {
    "mlp_pre": ("mlp.gate_proj", "out"),
    "mlp_pre_linear": ("mlp.up_proj", "out"),
    "mlp_act": ("mlp.down_proj", "in"),
}
_HEAD_NORMS: Final = {
    f"{letter}_norm_{side}": (f"self_attn.{letter}_norm", side) for letter in "qk" for side in ("in", "out")
}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(
        config="LlamaConfig",
        values={**_GROUPED, "attention_bias": True, "mlp_bias": True},
        modules={**_ENDS, **_PRE_NORM, **_GATED},
    ),
    "qwen3": Family(
        config="Qwen3Config",
        values=_GROUPED,
        modules={**_ENDS, **_PRE_NORM, **_GATED, **_HEAD_NORMS},
    ),
    "gemma2": Family(
        config="Gemma2Config",
        values={
            **_GROUPED,
            "layer_types": _TYPES,
            "sliding_window": 4,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        modules={
            **_ENDS,
            **_GATED,
            "resid_mid": ("pre_feedforward_layernorm", "in"),
            "attn_out_post": ("post_attention_layernorm", "out"),
            "mlp_out_post": ("post_feedforward_layernorm", "out"),
        },
    ),
    "gpt_neox": Family(
        config="GPTNeoXConfig",
        values={**_SIZES, "hidden_size": 128},
        blocks="gpt_neox.layers",
        modules={
            "resid_pre": ("", "in"),
            "resid_post": ("", "out"),
            "attn_in": ("attention", "in"),
            "z": ("attention.dense", "in"),
            "attn_out": ("attention.dense", "out"),
            "attn_out_post": ("attention.dense", "out"),
            "mlp_in": ("mlp", "in"),
            "mlp_pre": ("mlp.dense_h_to_4h", "out"),
            "mlp_act": ("mlp.dense_4h_to_h", "in"),
            "mlp_out": ("mlp", "out"),
            "mlp_out_post": ("mlp", "out"),
        },
        final_norm="gpt_neox.final_layer_norm",
    ),
    "moe": Family(
        config="Qwen3MoeConfig",
        values={
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
        modules={**_ENDS, **_PRE_NORM, **_HEAD_NORMS},
    ),
}
"""Grouped heads; query and key norms; sandwich norms, windows and softcaps; a parallel block; experts."""


def write_family(name: str, folder: Path) -> Path:
    """The checkpoint of one of :data:`FAMILIES`, below ``folder``, made at first use."""
    import transformers

    path = folder / name
    if not path.is_dir():
        family = FAMILIES[name]
        write_checkpoint(getattr(transformers, family.config)(**family.values), path)
    return path


def write_checkpoint(config: Any, folder: Path, *, seed: int = 0) -> Path:
    """A random model of a configuration, with random norm gains and biases, saved to ``folder``.

    Args:
        config: any configuration that ``transformers.AutoModelForCausalLM`` knows.
        folder: where the checkpoint goes.
        seed: seed of the weights.
    """
    import torch
    import transformers

    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        randomise(model, seed + 1)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return folder


def randomise(model: Any, seed: int) -> None:
    """Perturb every constant parameter of a model in place, and make the scores of its attention large."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value")):
                parameter.mul_(8.0)
            elif "embed" in name or "wte" in name:
                parameter.mul_(10.0)  # tokens differ by more than the blocks' biases add
