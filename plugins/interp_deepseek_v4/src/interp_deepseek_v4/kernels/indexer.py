"""The lightning indexer: which 512 compressed entries a query attends to, once there are more.

vLLM's ops pass the queries as fp8. `exact_queries` stands in for the function that would round them, and the scores
are computed from float32 queries and keys.
"""

from __future__ import annotations

from typing import Final

import torch

from interp_deepseek_v4.kernels.attention import portions
from interp_deepseek_v4.kernels.registry import Kernel
from interp_deepseek_v4.kernels.rope import rotate
from interp_deepseek_v4.kernels.store import STORE


def exact_queries(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cpu_sparse._fused_indexer_q_rope_quant_cpu` without the rounding: rotated queries, scaled head weights."""
    scale = index_weights_softmax_scale * index_weights_head_scale
    return rotate(index_q, positions, index_q_cos_sin_cache), index_weights.float() * scale


def fp8_paged_mqa_logits_cpu(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    block_size: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Scores `[T, max_seq_len]` of the entries in each query's pages, minus infinity where it has none.

    `q_fp8` `[T, heads, D]` must be the float32 queries of `exact_queries`; `weight` is `[T, heads]`.
    """
    if q_fp8.dtype != torch.float32:
        raise TypeError(f"the reference indexer scores float32 queries, and was given {q_fp8.dtype}")
    queries, heads, channels = q_fp8.shape
    longest = int(seq_lens.max()) if queries else 0
    places = torch.arange(longest)
    scores = torch.full((queries, max_seq_len), float("-inf"))
    starts = portions(queries, longest * (channels + heads))
    for start in starts:
        part = slice(start, start + starts.step)
        valid = places < seq_lens[part].unsqueeze(-1)
        slots = page_table[part].long()[:, places // block_size] * block_size + places % block_size
        keys = STORE.read(kvcache_fp8, block_size, slots.masked_fill(~valid, -1), channels)
        dots = torch.einsum("thd,tkd->thk", q_fp8[part], keys).relu()
        found = torch.einsum("thk,th->tk", dots, weight[part].float())
        scores[part, :longest] = found.masked_fill(~valid, float("-inf"))
    return scores


def topk_transform_512_cpu(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Places of each query's highest scores into `out_raw_indices`, their slots into `out_page_indices`; -1 after."""
    # As wide as the batch needs, so that ties fall as they do where transformers scores the same sequence.
    width = int(seq_lens.max()) if seq_lens.numel() else 0
    best = scores[:, :width].topk(min(out_page_indices.shape[1], width), dim=-1).indices
    invalid = best >= seq_lens.unsqueeze(-1)
    slots = page_tables.long().gather(1, best.masked_fill(invalid, 0) // page_size) * page_size + best % page_size
    for out, value in ((out_page_indices, slots), (out_raw_indices, best)):
        if out is not None:
            out.fill_(-1)
            out[:, : best.shape[1]] = value.masked_fill(invalid, -1).to(out.dtype)


KERNELS: Final = (
    Kernel(fp8_paged_mqa_logits_cpu),
    Kernel(topk_transform_512_cpu, mutates=("out_page_indices", "out_raw_indices")),
)
