"""The grouped output projection in the model's own dtype.

vLLM's CPU path rounds the heads and the weight of `wo_a` to bfloat16, because its packed product takes nothing else.
Here the weight is kept as it was loaded and multiplied plainly, so a float32 model stays one.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_wo_a(attention: Any) -> None:
    """In the place of `_wrap_wo_a_process_weights_after_loading`: keep the weight, pack nothing.

    `_wo_a_packed` becomes `[groups, rank, heads of the group * head_dim]`.
    """
    from vllm.models.deepseek_v4.cpu import cpu_sparse

    def keep(layer: Any) -> None:
        quantized = any(hasattr(layer, name) for name in ("weight_scale_inv", "weight_scale"))
        weight = cpu_sparse._dequant_linear_weight(layer) if quantized else layer.weight.detach()
        shape = (attention.n_local_groups, attention.o_lora_rank, -1)
        attention._wo_a_packed = weight.to(attention.q_norm.weight.dtype).view(shape)

    attention.wo_a.quant_method.process_weights_after_loading = keep


def o_proj(attention: Any, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """In the place of `_o_proj`: `[T, heads, head_dim]` to `[T, hidden_size]`."""
    from vllm import _custom_ops as ops
    from vllm.forward_context import get_forward_context

    if get_forward_context().attn_metadata is None:
        # A profiling run has no attention output to project.
        return o.new_zeros((o.shape[0], attention.hidden_size))
    table = attention.rotary_emb.cos_sin_cache
    heads = ops.inverse_gptj_rope_o_proj_cpu(o, positions, table, table.shape[-1]).to(o.dtype)
    groups = heads.reshape(o.shape[0], attention.n_local_groups, -1).transpose(0, 1)
    low_rank = torch.bmm(groups, attention._wo_a_packed.transpose(1, 2)).transpose(0, 1)
    return attention.wo_b(low_rank.flatten(1))
