"""Rotary embedding in GPT-J layout (neighbouring channels are a pair), on the trailing channels of a head.

vLLM's table `cos_sin_cache` is `[positions, rope_dim]`: the cosines of all pairs, then their sines.
"""

from __future__ import annotations

from typing import Final

import torch

from interp_deepseek_v4.kernels.registry import Kernel


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """`x` `[T, ..., D]` with its trailing rope channels rotated to (or back from) `positions` `[T]`, in float32."""
    cos, sin = table[positions.long()].float().chunk(2, dim=-1)
    if inverse:
        sin = -sin
    # Whatever axes stand between the token and the channel (heads) share the token's angles.
    between = (1,) * (x.dim() - 2)
    cos, sin = (part.view(part.shape[0], *between, part.shape[-1]) for part in (cos, sin))
    rope_dim = table.shape[-1]
    plain, rope = x.float().split([x.shape[-1] - rope_dim, rope_dim], dim=-1)
    even, odd = rope[..., 0::2], rope[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((plain, rotated.flatten(-2)), dim=-1)


def inverse_gptj_rope_o_proj_cpu(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int
) -> torch.Tensor:
    """Attention's output `[T, heads, D]` without the rotation that its values carried, in float32.

    Keys are values here, so what attention sums up is rotated by each key's position; turning it back by the
    query's makes it a function of the distance between the two.
    """
    if rope_dim != cos_sin_cache.shape[-1]:
        raise ValueError(f"the rope table is {cos_sin_cache.shape[-1]} wide, the op was asked for {rope_dim}")
    return rotate(o, positions[: o.shape[0]], cos_sin_cache, inverse=True)


KERNELS: Final = (Kernel(inverse_gptj_rope_o_proj_cpu),)
