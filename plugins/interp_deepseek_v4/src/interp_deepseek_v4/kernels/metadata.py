"""What vLLM's metadata builders compute with Triton kernels, in plain torch, where there is no Triton.

Only what the CPU attention and its indexer read is computed. The window's indices and the gather lengths are for
the GPU kernels; they get values that nobody can take for indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch


@attrs.frozen
class Plain:
    """A function where vLLM has a Triton kernel object, which is called, and warmed up before a compiled forward."""

    function: Callable[..., None]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)

    def register_warmup(self, *_: Any, **__: Any) -> None:
        """Nothing to compile."""


def token_requests(
    query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
) -> torch.Tensor:
    """`compute_token_to_req_indices`: the request of each of the batch's tokens, zero for padding."""
    # A boundary belongs to the request after it, and a request without tokens is stepped over.
    ends = query_start_loc[1:].long().contiguous()
    requests = torch.searchsorted(ends, torch.arange(num_tokens), right=True).clamp_(max=ends.numel() - 1)
    requests[num_mapped_tokens:] = 0
    out[:num_tokens] = requests.to(out.dtype)
    return out[:num_tokens]


def compressed_slots(
    out: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int,
) -> None:
    """`CompressedSlotMappingKernel`: the slot of the entry that a token closes, -1 for the others."""
    if dcp_world_size != 1:
        raise ValueError("the reference kernels do not know decode context parallelism")
    for request in range(block_table.shape[0]):
        start, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        positions = torch.arange(end - start) + int(seq_lens[request]) - (end - start)
        closes = ((positions + 1) % compress_ratio == 0) & (slot_mapping[start:end] != -1)
        entry = (positions // compress_ratio).masked_fill(~closes, 0)
        slots = block_table[request][entry // block_size].long() * block_size + entry % block_size
        out[start:end] = slots.masked_fill(~closes, -1)


def prefill_chunk(
    query_start_loc: torch.Tensor,
    uncompressed_seq_lens: torch.Tensor,
    cu_compressed_seq_lens: torch.Tensor,
    row_starts: torch.Tensor,
    token_to_seq: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    dcp_rank: int,
    dcp_world: int,
    dcp_interleave: int,
    *,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    """`BuildPrefillChunkMetadataKernel`: from where to where in the chunk's entries each query may look."""
    if dcp_world != 1:
        raise ValueError("the reference kernels do not know decode context parallelism")
    for request in range(num_reqs):
        start, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        rows = torch.arange(max(start, query_slice_start), min(end, query_slice_stop))
        context = rows - start + 1 + int(uncompressed_seq_lens[request]) - (end - start)
        # vLLM's CPU indexer finds a query's request by its start, and runs out of requests at the end of the entries:
        # there a prompt without entries begins one too late. It looks nowhere, so an earlier start does no harm.
        first = min(int(row_starts[request]), token_to_seq.shape[0] - 1)
        cu_seqlen_ks[rows - query_slice_start] = first
        cu_seqlen_ke[rows - query_slice_start] = (first + context // COMPRESS_RATIO).to(cu_seqlen_ke.dtype)
        token_to_seq[int(cu_compressed_seq_lens[request]) : int(cu_compressed_seq_lens[request + 1])] = request


def no_window_indices(indices: torch.Tensor, lens: torch.Tensor, *_: Any, **__: Any) -> None:
    """`ComputeSWAIndicesAndLensKernel`: the CPU attention works the window out from the positions."""
    indices.fill_(-1)
    lens.fill_(0)


def no_gather_lens(gather_lens: torch.Tensor, *_: Any, **__: Any) -> None:
    """`ComputePrefillMetadataKernel`: the CPU attention gathers no workspace."""
    gather_lens.fill_(-1)


def keeping_empty_chunks(build: Any) -> Any:
    """`build_prefill_chunk_metadata` that answers a chunk without compressed entries with one, not with `None`."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerPrefillChunkMetadata

    @functools.wraps(build)
    def build_chunk(
        start_idx: int, end_idx: int, query_start_loc: Any, query_start_loc_cpu: Any, *args: Any, **kwargs: Any
    ) -> Any:
        chunk = build(start_idx, end_idx, query_start_loc, query_start_loc_cpu, *args, **kwargs)
        if chunk is not None:
            return chunk
        first, last = (int(query_start_loc_cpu[index]) for index in (start_idx, end_idx))
        nowhere = torch.zeros(last - first, dtype=torch.int32)
        bounds = torch.zeros(end_idx - start_idx + 1, dtype=torch.int32)
        return DeepseekV32IndexerPrefillChunkMetadata(
            block_table=torch.zeros(end_idx - start_idx, 1, dtype=torch.int32),
            cu_seqlen_ks=nowhere,
            cu_seqlen_ke=nowhere,
            cu_seq_lens=bounds,
            token_to_seq=torch.zeros(0, dtype=torch.int32),
            total_seq_lens=0,
            token_start=first,
            token_end=last,
            num_reqs=end_idx - start_idx,
            local_cu_seq_lens=bounds,
        )

    build_chunk._keeps_empty_chunks = True  # type: ignore[attr-defined]
    return build_chunk
