"""Tiny random checkpoints of trunks whose blocks differ, add up several terms, or weigh the residual."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_families
import torch
import transformers as hf
from tiny_families import _GROUPED, _WIDE

__all__ = ["BLOCKLESS", "HYBRIDS", "save"]

_STATES = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_chunk_size": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
_SHARED = {
    **{key: value for key, value in _GROUPED.items() if key != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "mamba_d_state": 8,
    "use_mamba_kernels": False,
}
_GEMMA4 = {
    **_WIDE,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "rope_parameters": _ROPES,
    "final_logit_softcapping": 3.0,
}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300}

HYBRIDS: dict[str, Callable[[], Any]] = {
    "bamba": lambda: hf.BambaConfig(**_GROUPED, **_STATES, mamba_n_groups=1, attn_layer_indices=[1, 3]),
    "doge": lambda: hf.DogeConfig(**_GROUPED),
    "falcon_h1": lambda: hf.FalconH1Config(
        **_WIDE,
        **_STATES,
        mamba_d_ssm=96,
        mamba_n_groups=1,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
        attention_in_multiplier=0.7,
        attention_out_multiplier=0.6,
        ssm_in_multiplier=0.8,
        ssm_out_multiplier=0.9,
        key_multiplier=0.5,
        mlp_multipliers=[0.8, 0.7],
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(**_GEMMA4, **_PER_LAYER, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "gemma4-keys_are_values": lambda: hf.Gemma4TextConfig(
        **_GEMMA4, num_kv_shared_layers=0, hidden_size_per_layer_input=0, attention_k_eq_v=True
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **_GROUPED,
        **_STATES,
        **_LINEAR,
        **tiny_families._MULTIPLIERS,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
    ),
    "granitemoehybrid-dense": lambda: hf.GraniteMoeHybridConfig(
        **_GROUPED,
        **_STATES,
        **_LINEAR,
        **tiny_families._MULTIPLIERS,
        num_local_experts=0,
        shared_intermediate_size=40,
        position_embedding_type="rope",
    ),
    "inkling": lambda: hf.InklingTextConfig(
        **_WIDE,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=12,
        sliding_window_size=4,
        d_rel=4,
        rel_extent=32,
        n_routed_experts=4,
        n_shared_experts=1,
        **_EXPERTS,
    ),
    "jamba": lambda: hf.JambaConfig(
        **_GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "lfm2": lambda: hf.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention"] * 2),
    "mamba": lambda: hf.MambaConfig(vocab_size=300, hidden_size=48, num_hidden_layers=4, state_size=8),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=300, hidden_size=48, num_hidden_layers=4, state_size=8, num_heads=8, head_dim=12, n_groups=1
    ),
    "minimax": lambda: hf.MiniMaxConfig(
        **_WIDE,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "linear_attention"] * 2,
        block_size=4,
        mlp_alpha_factor=1.2,
        mlp_beta_factor=0.9,
        full_attn_alpha_factor=1.1,
        linear_attn_beta_factor=0.8,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **{key: value for key, value in _WIDE.items() if key != "num_hidden_layers"},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=12,
        n_groups=1,
        chunk_size=4,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=24,
        **_EXPERTS,
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **_GROUPED,
        **_LINEAR,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=12,
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        **_GROUPED, head_dim=12, block_types=["recurrent", "attention"], attention_window_size=4, lru_width=48
    ),
    "zamba": lambda: hf.ZambaConfig(**_SHARED, attention_hidden_size=96, n_mamba_heads=2, mamba_dt_rank=8),
    "zamba2": lambda: hf.Zamba2Config(
        **_SHARED, n_mamba_heads=8, mamba_ngroups=1, chunk_size=4, adapter_rank=6, use_shared_attention_adapter=True
    ),
    "zaya": lambda: hf.ZayaConfig(
        **_WIDE,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
        router_hidden_size=16,
        initializer_range=0.2,  # so that rounding stays small beside what experts add
    ),
}

# Trunks without blocks that each run once on the tokens of a prompt.
BLOCKLESS: dict[str, Callable[[], Any]] = {
    "cpmant": lambda: hf.CpmAntConfig(
        vocab_size=300,
        hidden_size=48,
        num_attention_heads=4,
        dim_head=12,
        dim_ff=80,
        num_hidden_layers=2,
        prompt_types=4,
        prompt_length=4,
        segment_types=4,
        init_std=0.2,
    ),
    "hrm_text": lambda: hf.HrmTextConfig(
        **{**_WIDE, "num_hidden_layers": 2}, H_cycles=2, L_cycles=2, initializer_range=0.2, prefix_lm=False
    ),
}


def save(family: str, root: Path) -> str:
    """The folder of a family's checkpoint, made at first use."""
    folder = root / f"hybrid-{family}"
    if not folder.is_dir():
        tiny_families.write((HYBRIDS | BLOCKLESS)[family], folder)
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
        for number, scalar in enumerate(scalars):
            torch.nn.init.constant_(scalar, 0.7 + 0.2 * number)  # a weight that initialisers leave at 1
        if scalars:
            model.save_pretrained(folder)
    return str(folder)
