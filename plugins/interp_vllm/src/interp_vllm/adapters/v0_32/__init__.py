"""Private names of vLLM 0.32, the only place that knows them. Found in its source; probed before use."""

from __future__ import annotations

from typing import Final

from interp_vllm.adapters.v0_32.engine import (
    client_errors,
    cpu_head_sizes,
    longest,
    model_of_engine,
    start_engine,
    stop_engine,
)
from interp_vllm.adapters.v0_32.worker import (
    all_gather,
    attention_of,
    bare_logits,
    embedding,
    extra_args,
    finished_logits,
    forward_terms,
    is_missing,
    kernel_terms,
    knows,
    linear_kind,
    mend_pipeline,
    model_of,
    no_gradients,
    on_forward,
    on_load,
    route,
    run_python,
    set_head_terms,
    stages,
    step_rows,
    tensor_parallel,
)

__all__ = [
    "NAMES",
    "all_gather",
    "attention_of",
    "bare_logits",
    "client_errors",
    "cpu_head_sizes",
    "embedding",
    "extra_args",
    "finished_logits",
    "forward_terms",
    "is_missing",
    "kernel_terms",
    "knows",
    "linear_kind",
    "longest",
    "mend_pipeline",
    "model_of",
    "model_of_engine",
    "no_gradients",
    "on_forward",
    "on_load",
    "route",
    "run_python",
    "set_head_terms",
    "stages",
    "start_engine",
    "step_rows",
    "stop_engine",
    "tensor_parallel",
]

NAMES: Final = (
    ("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc"),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._model_forward"),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch.num_reqs"),
    ("vllm.model_executor.layers.attention", "Attention.forward"),
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor._apply_head"),
    ("vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter.select_experts"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.exceptions", "VLLMValidationError"),
)
