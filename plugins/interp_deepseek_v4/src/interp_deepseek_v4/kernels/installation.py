"""Which ops a build of vLLM lacks, and the places in vLLM where the reference versions go."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from interp_deepseek_v4.kernels import (
    attention,
    compressor,
    experts,
    hyper,
    indexer,
    metadata,
    projection,
    registry,
    rope,
    routing,
)

# Ops without a reference version: their callers are replaced, because they ask for rounded operands.
PROJECTION_OPS: Final = ("convert_weight_packed", "bmm_cpu")
INDEXER_QUERY_OP: Final = "fused_indexer_q_rope_quant_cpu"

# These write and read the same caches, each version in a layout of its own.
CACHE_KERNELS: Final = (*attention.KERNELS, *compressor.KERNELS, *indexer.KERNELS)
CACHE_OPS: Final = (*(kernel.name for kernel in CACHE_KERNELS), INDEXER_QUERY_OP)
OTHER_KERNELS: Final = (*hyper.KERNELS, *rope.KERNELS, *routing.KERNELS)

_MENDED: Final[set[type]] = set()


def lacking() -> list[str]:
    """Names of the ops that the build lacks, in the order in which a forward needs them."""
    # Loads the compiled library of this machine, and declares fake versions of what exists in it. It must have
    # done so before an op is registered here, or it would declare a second one.
    import vllm._custom_ops  # noqa: F401

    names = (*PROJECTION_OPS, *(kernel.name for kernel in OTHER_KERNELS), *CACHE_OPS)
    return [name for name in names if not registry.compiled(name)]


def put_in_place(*, replace: bool) -> None:
    """Everything that `interp_deepseek_v4.kernels.install` promises."""
    missing = set(lacking())
    shared = missing.intersection(CACHE_OPS)
    if shared and len(shared) != len(CACHE_OPS) and not replace:
        raise RuntimeError(
            f"this build of vLLM lacks {', '.join(sorted(shared))} and has the other ops of the same cache; "
            "reference versions keep its content elsewhere and cannot be mixed with compiled ones"
        )
    registry.register((*OTHER_KERNELS, *CACHE_KERNELS), replace=replace)
    if replace or not missing.isdisjoint(PROJECTION_OPS):
        _keep_the_dtype_of_the_projection()
    if replace or INDEXER_QUERY_OP in missing:
        _keep_the_indexer_queries()
    _keep_the_limit_of_the_experts()
    _replace_triton()
    _mend_tile_schedule()
    _mend_empty_chunks()


def _keep_the_dtype_of_the_projection() -> None:
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention

    DeepseekV4CPUAttention._wrap_wo_a_process_weights_after_loading = projection.keep_wo_a
    DeepseekV4CPUAttention._o_proj = projection.o_proj


def _keep_the_limit_of_the_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = experts.keep_weights
    CPUUnquantizedExperts.apply = experts.apply


def _keep_the_indexer_queries() -> None:
    from vllm.models.deepseek_v4.cpu import cpu_sparse

    cpu_sparse._fused_indexer_q_rope_quant_cpu = indexer.exact_queries


def _replace_triton() -> None:
    """The kernels that the builders of this model launch, unless Triton can run them (as triton-cpu does)."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return
    from vllm.v1.attention.backends.mla import compressor_utils, sparse_swa
    from vllm.v1.attention.backends.mla import indexer as indexer_backend
    from vllm.v1.attention.ops import metadata as metadata_ops

    places: tuple[tuple[ModuleType, str, Any], ...] = (
        (metadata_ops, "compute_token_to_req_indices", metadata.token_requests),
        (sparse_swa, "compute_token_to_req_indices", metadata.token_requests),
        (sparse_swa, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", metadata.Plain(metadata.no_window_indices)),
        (sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL", metadata.Plain(metadata.no_gather_lens)),
        (compressor_utils, "_COMPRESSED_SLOT_MAPPING_KERNEL", metadata.Plain(metadata.compressed_slots)),
        (indexer_backend, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", metadata.Plain(metadata.prefill_chunk)),
    )
    for module, name, replacement in places:
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name}: the reference kernels were written for vLLM 0.32")
        setattr(module, name, replacement)


def _mend_tile_schedule() -> None:
    """vLLM 0.32 reads a plan for layer types ('c1a', 'c2a') that its CPU builder leaves out: `KeyError`."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    if Builder in _MENDED:
        return
    _MENDED.add(Builder)
    original = Builder.build_tile_scheduler

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        return {"c1a": None, "c2a": None, **original(self, num_decode_tokens)}

    Builder.build_tile_scheduler = build_tile_scheduler


def _mend_empty_chunks() -> None:
    """vLLM 0.32 makes no chunk of prompts that have no compressed entry yet, those of up to three tokens.

    Its CPU indexer then fails on the missing chunk where a long sequence is decoded beside them.
    """
    from vllm.v1.attention.backends.mla import indexer as indexer_backend

    original = indexer_backend.build_prefill_chunk_metadata
    if getattr(original, "_keeps_empty_chunks", False):
        return
    indexer_backend.build_prefill_chunk_metadata = metadata.keeping_empty_chunks(original)
