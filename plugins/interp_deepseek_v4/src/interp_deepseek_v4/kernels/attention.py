"""Writing keys/values of the sliding window, and attention over the window and the compressed entries.

One vector a token is key and value for all heads. The window and the compressed entries come as slots that vLLM has
worked out for every query, so causality is in them: `-1` is a place that the query may not see.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from interp_deepseek_v4.kernels.registry import Kernel
from interp_deepseek_v4.kernels.rope import rotate
from interp_deepseek_v4.kernels.store import STORE

# Every query gathers keys of its own, so queries are taken in portions: 64 MiB of float32 at a time.
GATHERED: Final = 1 << 24


def portions(total: int, floats_each: int) -> range:
    """Starts of portions of `total` queries that gather `floats_each` numbers each; its step is the portion."""
    return range(0, total, max(1, GATHERED // max(1, floats_each)))


def fused_qnorm_rope_kv_insert_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    swa_kv_cache_2d: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
) -> torch.Tensor:
    """The queries `[T, heads, D]` normed per head and rotated, padded with empty heads; stores the rotated `kv`."""
    normed = q.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    queries = rotate(normed, positions, cos_sin_cache).to(q.dtype)
    tokens = slot_mapping.shape[0]
    rows = rotate(kv[:tokens], positions[:tokens], cos_sin_cache)
    STORE.write(swa_kv_cache_2d, cache_block_size, slot_mapping, rows)
    # A new tensor in any case: an op must not return its argument.
    return F.pad(queries, (0, 0, 0, q_head_padded - q.shape[1]))


def flash_mla_with_kvcache_cpu(
    out: torch.Tensor,
    q: torch.Tensor,
    window_cache_2d: torch.Tensor,
    window_slots: torch.Tensor,
    window_block_size: int,
    compressed_cache_2d: torch.Tensor,
    compressed_slots: torch.Tensor,
    compressed_block_size: int,
    attn_sink: torch.Tensor,
    scale: float,
) -> None:
    """Attention of `q` `[T, heads, D]` over both sets of slots `[T, K]`, with a learned sink per head, into `out`."""
    channels = q.shape[-1]
    # vLLM makes both as wide as they can become; what no query of this batch sees is not gathered.
    window_slots, compressed_slots = (slots[:, (slots >= 0).any(0)] for slots in (window_slots, compressed_slots))
    starts = portions(q.shape[0], channels * (window_slots.shape[1] + compressed_slots.shape[1]))
    for start in starts:
        part = slice(start, start + starts.step)
        keys = torch.cat(
            (
                STORE.read(window_cache_2d, window_block_size, window_slots[part], channels),
                STORE.read(compressed_cache_2d, compressed_block_size, compressed_slots[part], channels),
            ),
            dim=1,
        )
        seen = torch.cat((window_slots[part], compressed_slots[part]), dim=1) >= 0
        out[part] = _attend(q[part].float(), keys, seen, attn_sink.float(), scale).to(out.dtype)


def _attend(q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention where each query has keys `[T, K, D]` of its own; the sink takes weight and gives nothing."""
    logits = torch.einsum("thd,tkd->thk", q, keys) * scale
    logits = logits.masked_fill(~seen.unsqueeze(1), float("-inf"))
    logits = torch.cat((logits, sink.view(1, -1, 1).expand(logits.shape[0], -1, 1)), dim=-1)
    return torch.einsum("thk,tkd->thd", logits.softmax(-1)[..., :-1], keys)


KERNELS: Final = (
    Kernel(fused_qnorm_rope_kv_insert_cpu, mutates=("swa_kv_cache_2d",)),
    Kernel(flash_mla_with_kvcache_cpu, mutates=("out",)),
)
