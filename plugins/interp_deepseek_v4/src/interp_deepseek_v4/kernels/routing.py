"""Which experts a token goes to, and with what weights: by score, or by a table of token ids.

The weights are the square root of the softplus of the router's logits, made to sum to the scaling factor over the
chosen experts. As `DeepseekV4TopKRouter` and `DeepseekV4HashRouter` of transformers have it.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from interp_deepseek_v4.kernels.registry import Kernel


def _scores(logits: torch.Tensor, scoring_func: str, num_fused_shared_experts: int) -> torch.Tensor:
    """The score of every expert, `[T, experts]`; refuses what vLLM's CPU router never asks for."""
    if scoring_func != "sqrtsoftplus":
        raise ValueError(f"the reference routing knows sqrtsoftplus scores only, not {scoring_func!r}")
    if num_fused_shared_experts:
        raise ValueError("the reference routing does not know shared experts fused into the routed ones")
    return F.softplus(logits.float()).sqrt()


def _weighted(
    scores: torch.Tensor, experts: torch.Tensor, scaling: float, *, renormalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(weights [T, k] float32, experts [T, k] int32)`."""
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts.to(torch.int32)


def hash_topk_cpu(
    gating_output: torch.Tensor,
    tid2eid: torch.Tensor,
    topk: int,
    scoring_func: str,
    num_fused_shared_experts: int,
    num_experts: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts from the table: `tid2eid` `[T, k]` is its row for every token; the logits only weigh them."""
    scores = _scores(gating_output, scoring_func, num_fused_shared_experts)
    if tid2eid.shape[1] != topk or scores.shape[1] != num_experts:
        raise ValueError(f"table rows of {tid2eid.shape[1]} for top {topk}, {scores.shape[1]} of {num_experts} logits")
    return _weighted(scores, tid2eid.long(), routed_scaling_factor)


def biased_topk_cpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts by score plus the correction bias, which chooses only: the weights are the scores without it."""
    scores = _scores(gating_output, scoring_func, num_fused_shared_experts)
    experts = torch.topk(scores + correction_bias.float(), topk, dim=-1, sorted=False).indices
    scaling = (
        1.0 if routed_scaling_factor is None or not apply_routed_scaling_factor_on_output else routed_scaling_factor
    )
    return _weighted(scores, experts, scaling, renormalize=renormalize)


KERNELS: Final = (Kernel(hash_topk_cpu), Kernel(biased_topk_cpu))
