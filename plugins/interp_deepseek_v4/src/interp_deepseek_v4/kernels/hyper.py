"""Hyper-connections: the collapse of the residual streams, their remixing, and the final contraction.

The same arithmetic as `DeepseekV4HyperConnection` and `DeepseekV4HyperHead` of transformers, for streams
`[T, N, D]`. Everything is computed in float32 and returned in the dtype of the streams.
"""

from __future__ import annotations

from typing import Final

import torch

from interp_deepseek_v4.kernels.registry import Kernel


def _mixing_logits(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What the learned projection says of each token's streams, after their common RMS norm: `[T, rows]`."""
    flat = streams.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return flat @ weight.float().t()


def _weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """`sum_n weights[t, n] * streams[t, n]`, in the dtype of the streams."""
    return (weights.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def _sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Sinkhorn-Knopp: rows and columns that sum to one. Columns come last, so theirs are the tight sums."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def hc_pre_fused_cpu(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_mult: int,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(collapsed [T, D], post [T, N], comb [T, N, N])` of the streams `x` `[T, N, D]`."""
    sizes = [hc_mult, hc_mult, hc_mult * hc_mult]
    pre, post, comb = _mixing_logits(x, hc_fn, rms_eps).split(sizes, dim=-1)
    pre_base, post_base, comb_base = hc_base.split(sizes)
    pre = torch.sigmoid(pre * hc_scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * hc_scale[1] + post_base)
    comb = (comb * hc_scale[2] + comb_base).unflatten(-1, (hc_mult, hc_mult))
    comb = _sinkhorn(torch.softmax(comb, dim=-1) + hc_eps, sinkhorn_iters, hc_eps)
    return _weighted_sum(pre, x), post, comb


def hc_post_fused_cpu(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The block's output `x` written to every stream, over the remixed `residual`: `[T, N, D]`.

    `comb` is used transposed: its first stream axis is the one that is summed over.
    """
    written = post.unsqueeze(-1) * x.float().unsqueeze(1)
    return (written + torch.matmul(comb.transpose(-1, -2), residual.float())).to(x.dtype)


def hc_head_fused_cpu(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_eps: float,
    norm_eps: float,
) -> torch.Tensor:
    """The contraction of the streams that the final norm reads: `[T, D]`."""
    weights = torch.sigmoid(_mixing_logits(x, hc_fn, norm_eps) * hc_scale + hc_base) + hc_eps
    return _weighted_sum(weights, x)


KERNELS: Final = (Kernel(hc_pre_fused_cpu), Kernel(hc_post_fused_cpu), Kernel(hc_head_fused_cpu))
