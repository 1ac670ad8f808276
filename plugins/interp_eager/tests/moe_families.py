"""Tiny random checkpoints of families with mixtures of experts, and their experts and shared parts by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny_families
import torch
import torch.nn.functional as F
import transformers as hf
from tiny_families import _GROUPED, _MIXED, _MULTIPLIERS, _WIDE
from torch import Tensor

__all__ = ["FAMILIES", "expert", "save", "shared"]

_QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3}
_GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "moe_intermediate_size": 32}
_ROUTED = {**_GROUPS, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 3}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_TYPES = {"layer_types": _MIXED["layer_types"], "sliding_window": 4}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 40,
}
_MAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, **_LOCAL),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **_GROUPED, **_QWEN, shared_expert_intermediate_size=40, mlp_only_layers=[0], norm_topk_prob=False
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_WIDE, **_QWEN, decoder_sparse_step=2, norm_topk_prob=True),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_WIDE, **_QWEN, **_LINEAR),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(
        **_without(_WIDE, "intermediate_size"),
        **_QWEN,
        **_LINEAR,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
        },
    ),
    "olmoe": lambda: hf.OlmoeConfig(**_GROUPED, num_experts=6, num_experts_per_tok=3),
    "flex_olmo": lambda: hf.FlexOlmoConfig(**_GROUPED, num_experts=6, num_experts_per_tok=3),
    "granitemoe": lambda: hf.GraniteMoeConfig(**_GROUPED, **_LOCAL, **_MULTIPLIERS, attention_multiplier=0.1),
    "gpt_oss": lambda: hf.GptOssConfig(**_WIDE, **_LOCAL, **_TYPES),
    "phimoe": lambda: hf.PhimoeConfig(**_GROUPED, num_local_experts=6, num_experts_per_tok=2, router_jitter_noise=0.5),
    "aria_text": lambda: hf.AriaTextConfig(**_GROUPED, moe_num_experts=6, moe_topk=3, moe_num_shared_experts=2),
    "dots1": lambda: hf.Dots1Config(**_GROUPED, **_ROUTED, **_TYPES, first_k_dense_replace=1, norm_topk_prob=True),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **_GROUPED, moe_num_experts=6, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=2
    ),
    "exaone_moe": lambda: hf.ExaoneMoeConfig(
        **_WIDE, **_GROUPS, **_TYPES, num_experts=6, num_experts_per_tok=3, num_shared_experts=1
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **_WIDE, **_ROUTED, first_k_dense_replace=1, norm_topk_prob=False, use_qk_norm=True
    ),
    "mellum": lambda: hf.MellumConfig(**_WIDE, **_QWEN, **_TYPES, **_SPARSE, norm_topk_prob=True),
    "minimax_m2": lambda: hf.MiniMaxM2Config(**_WIDE, **_LOCAL),
    "solar_open": lambda: hf.SolarOpenConfig(**_without(_WIDE, "intermediate_size"), **_ROUTED),
    "afmoe": lambda: hf.AfmoeConfig(
        **_WIDE, **_QWEN, **_TYPES, num_dense_layers=1, num_shared_experts=1, route_scale=2.5, mup_enabled=True
    ),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **_GROUPED, **_QWEN, num_dense_layers=1, layer_types=["conv", "full_attention"] * 2, routed_scaling_factor=1.5
    ),
    "cohere2_moe": lambda: hf.Cohere2MoeConfig(
        **_WIDE,
        **_TYPES,
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        logit_scale=0.25,
    ),
    "dbrx": lambda: hf.DbrxConfig(
        vocab_size=300,
        d_model=48,
        n_heads=4,
        n_layers=4,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        ffn_config={"hidden_size": 48, "ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 3},
    ),
    "granitemoe_swa": lambda: hf.GraniteMoeSWAConfig(
        **_GROUPED, **_LOCAL, **_TYPES, **_MULTIPLIERS, attention_multiplier=0.1, shared_intermediate_size=40
    ),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **_GROUPED, **_LOCAL, **_MULTIPLIERS, attention_multiplier=0.1, shared_intermediate_size=40
    ),
    "hunyuan_v1_moe": lambda: hf.HunYuanMoEV1Config(**_WIDE, num_experts=6, moe_topk=3),
    "hy_v3": lambda: hf.HYV3Config(**_WIDE, **_QWEN, **_SPARSE, num_shared_experts=1, router_scaling_factor=2.5),
    "laguna": lambda: hf.LagunaConfig(
        **_WIDE,
        **_QWEN,
        **_TYPES,
        **_SPARSE,
        shared_expert_intermediate_size=40,
        gating="per-element",
        moe_routed_scaling_factor=2.5,
        num_attention_heads_per_layer=[4, 2, 4, 2],
    ),
    "llama4_text": lambda: hf.Llama4TextConfig(
        **_WIDE,
        num_local_experts=6,
        num_experts_per_tok=2,
        moe_layers=[1, 2, 3],
        intermediate_size_mlp=80,
        attention_chunk_size=4,
        floor_scale=4,
        no_rope_layer_interval=2,
    ),
    "mimo_v2_flash": lambda: hf.MiMoV2FlashConfig(
        **{**_WIDE, "num_key_value_heads": 1},
        **_without(_ROUTED, "n_shared_experts"),
        **_TYPES,
        **_SPARSE,
        v_head_dim=8,
    ),
    "jamba": lambda: hf.JambaConfig(
        **_GROUPED, **_MAMBA, num_experts=6, num_experts_per_tok=3, attn_layer_period=2, attn_layer_offset=1
    ),
}


def save(family: str, root: Path) -> str:
    """The folder of a family's checkpoint, made at first use: logits apart, experts as large as what is beside them."""
    auto = hf.AutoModelForImageTextToText if family.endswith("-wrapper") else hf.AutoModelForCausalLM
    # Others keep a checkpoint of another form under the plain name.
    return tiny_families.write(FAMILIES[family], root / f"moe-{family}", auto, _spread)


def _spread(name: str, tensor: Tensor) -> None:
    if ".experts." in name and (tensor.dim() == 3 or ".experts.mlp." in name):
        tensor.mul_(6.0)
    elif name.endswith((".gate.weight", ".router.weight", ".wg.weight", ".router.layer.weight")):
        tensor.mul_(10.0)


def expert(family: str, experts: Any, number: int, x: Tensor) -> Tensor:
    """What one expert makes of rows ``[pos, d_model]``, from its own weights."""
    if family == "dbrx":
        into, linear, out = (getattr(experts.mlp, name).unflatten(0, (6, -1))[number] for name in ("w1", "v1", "w2"))
        return (F.silu(x @ into.T) * (x @ linear.T)) @ out
    into, out = experts.gate_up_proj[number], experts.down_proj[number]
    if family not in _TRANSPOSED:
        into, out = into.T, out.T
    both = x @ into
    if family == "gpt_oss":
        both = both + experts.gate_up_proj_bias[number]
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(gate * 1.702)) @ out + experts.down_proj_bias[number]
    gate, up = both.chunk(2, dim=-1)
    return (F.silu(gate) * up) @ out


_TRANSPOSED = ("aria_text", "gpt_oss", "llama4_text")


def shared(family: str, block: Any, x: Tensor) -> Tensor | float:
    """What the experts that every token uses add to the rows of a block (``block``: the whole of it, or its MLP)."""
    if hasattr(block, "shared_expert_gate"):
        return torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    for name in ("shared_experts", "shared_expert", "shared_mlp"):
        part = getattr(block, name, None)
        if part is not None:
            return part(x) * (0.5 if family == "cohere2_moe" else 1.0)
    return 0.0
