"""Compressed entries: one key/value for every 4 (or 128) tokens, a gated mean over their window.

vLLM keeps each token's projections in a cache of float32 states, so that a window may begin in one step and end in
another. The states are exact there and stay there; only the entries go to the side store.
"""

from __future__ import annotations

from typing import Final

import torch

from interp_deepseek_v4.kernels.registry import Kernel
from interp_deepseek_v4.kernels.rope import rotate
from interp_deepseek_v4.kernels.store import STORE


def save_partial_states_cpu(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Keep every token's `kv` and its gate logits (the score plus its place's bias in the window) as one state."""
    valid = slot_mapping >= 0
    slots, tokens = slot_mapping[valid].long(), slot_mapping.shape[0]
    gate = score[:tokens].float() + ape[positions[:tokens] % ape.shape[0]].float()
    states = torch.cat((kv[:tokens].float(), gate), dim=-1)[valid]
    block_size = state_cache.shape[1]
    state_cache[slots // block_size, slots % block_size] = states


def _window_means(states: torch.Tensor, seen: torch.Tensor, ratio: int, channels: int) -> torch.Tensor:
    """The gated mean `[n, D]` over windows of `states` `[n, W, 2 * width]`, where `seen` `[n, W]`."""
    kv, gate = states.chunk(2, dim=-1)
    if kv.shape[-1] == 2 * channels:
        # Overlapping windows: a token gives one half to the entry that its own window closes and the other to the
        # next one. The first `ratio` places of a window are the tokens of the one before.
        kv, gate = (torch.cat((part[:, :ratio, :channels], part[:, ratio:, channels:]), dim=1) for part in (kv, gate))
    # Before the sequence there is nothing: those places have no weight, and whatever is read for them no say.
    gate = gate.masked_fill(~seen.unsqueeze(-1), float("-inf"))
    kv = kv.masked_fill(~seen.unsqueeze(-1), 0.0)
    return (kv * gate.softmax(1)).sum(1)


def compress_and_store(
    state_cache: torch.Tensor,
    gather_slots: torch.Tensor,
    positions: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    kv_cache_2d: torch.Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """Entries of the windows that end with one of these tokens: mean, norm, rotation, side store."""
    tokens = min(gather_slots.shape[0], kv_slot_mapping.shape[0])
    positions, kv_slots = positions[:tokens], kv_slot_mapping[:tokens]
    ends = ((positions + 1) % compress_ratio == 0) & (kv_slots >= 0)
    if not bool(ends.any()):
        return
    slots = gather_slots[:tokens][ends]
    block_size, read = state_cache.shape[1], slots.clamp(min=0)
    states = state_cache[read // block_size, read % block_size]
    means = _window_means(states, slots >= 0, compress_ratio, rms_norm_weight.shape[0])
    normed = means * torch.rsqrt(means.square().mean(-1, keepdim=True) + rms_norm_eps) * rms_norm_weight
    # An entry stands where its window begins.
    begins = positions[ends] // compress_ratio * compress_ratio
    STORE.write(kv_cache_2d, kv_cache_block_size, kv_slots[ends], rotate(normed, begins, cos_sin_cache))


KERNELS: Final = (
    Kernel(save_partial_states_cpu, mutates=("state_cache",)),
    # Entries that attention reads, and those that the indexer scores: the same thing at another width.
    Kernel(compress_and_store, mutates=("kv_cache_2d",), op="compress_norm_rope_store_cpu"),
    Kernel(compress_and_store, mutates=("kv_cache_2d",), op="compress_norm_rope_store_indexer_cpu"),
)
