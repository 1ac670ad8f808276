"""The routed experts with the limit on their activation, which vLLM's CPU kernel for unquantised weights leaves out.

vLLM 0.32 hands the limit (``swiglu_limit``) to the experts' ``quant_config``, and its compiled product for plain
weights takes none, so that a model whose activations pass the limit gives other numbers there without a word.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def keep_weights(experts: Any, layer: torch.nn.Module) -> None:
    """In the place of ``process_weights_after_loading``: weights stay as they were loaded, ``[experts, out, in]``."""
    experts._use_zentorch = False


def apply(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    """In the place of ``apply``: ``output`` ``[T, D]`` is the weighted sum over each token's experts, in float32."""
    if expert_map is not None or str(activation.value).lower() != "silu":
        raise ValueError("the reference experts know all experts on one rank, with SiLU gates")
    limit = experts.quant_config.gemm1_clamp_limit
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, place = torch.where(topk_ids == expert)
        gate, up = F.linear(hidden_states[tokens].float(), w1[expert].float()).chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        rows = F.linear(F.silu(gate) * up, w2[expert].float())
        total.index_add_(0, tokens, rows * topk_weights[tokens, place, None].float())
    output.copy_(total.to(output.dtype))
