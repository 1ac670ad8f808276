"""Private names of vLLM 0.32, the only place that knows them. Found in its source; probed before use."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = [
    "NAMES",
    "all_gather",
    "attention_of",
    "bare_logits",
    "client_errors",
    "embedding",
    "extra_args",
    "finished_logits",
    "is_missing",
    "kernel_terms",
    "knows",
    "longest",
    "mend_pipeline",
    "model_of",
    "model_of_engine",
    "on_forward",
    "route",
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


_PATIENCE: Final = 30.0
"""Seconds that an engine's processes get to end by themselves."""

# In the process that asks.


def start_engine(arguments: Mapping[str, Any]) -> Any:
    """An ``AsyncLLM``; to be called on the loop that will serve it.

    Args:
        arguments: keyword arguments of vLLM's ``EngineArgs``.
    """
    with _quiet(), _without_main():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        chosen = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        config = AsyncEngineArgs(**arguments).create_engine_config()
        if chosen is not None:
            # vLLM's CPU platform overwrites how processes start, also where the user had said it.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = chosen
        executor = Executor.get_class(config)
        return AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)


def client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises where the request is at fault, and not the engine."""
    from vllm.exceptions import VLLMClientError, VLLMValidationError

    return (ValueError, TypeError, VLLMClientError, VLLMValidationError)


def longest(llm: Any) -> int:
    """Most tokens of one sequence."""
    return int(llm.model_config.max_model_len)


@contextmanager
def _quiet() -> Iterator[None]:
    """vLLM's log goes to standard error and holds errors only, unless the user said otherwise.

    Its own default writes to standard output, where a command's answer is.
    """
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    ours = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _without_main() -> Iterator[None]:
    """Children do not run the user's main module again: they need nothing of it, and it may have no guard."""
    main = sys.modules["__main__"]
    kept = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def stop_engine(llm: Any) -> None:
    """End an ``AsyncLLM`` and its processes, from any thread but its loop's."""
    from vllm.utils.async_utils import cancel_task_threadsafe

    if llm.output_handler is not None:
        # Else it takes the end of the processes for a crash, and says so.
        cancel_task_threadsafe(llm.output_handler)
    # Its default kills what has not gone within five seconds, and then its shared memory stays behind.
    llm.shutdown(timeout=_PATIENCE)


# In the worker.


def model_of(worker: Any) -> nn.Module:
    """The model that a worker runs."""
    model: nn.Module = worker.model_runner.get_model()
    return model


def on_forward(worker: Any, around: Callable[[Callable[[], Any], int], Any]) -> None:
    """Call ``around(forward, rows)`` in place of each real forward; profiling and dummy runs are left alone."""
    runner = worker.model_runner
    plain = runner._model_forward

    @functools.wraps(plain)
    def wrapped(input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(plain, input_ids, positions, *args, **kwargs), int(positions.shape[-1]))

    runner._model_forward = wrapped


def mend_pipeline(worker: Any) -> None:
    """Give a later pipeline stage the buffers for what comes from the stage before.

    On a CPU vLLM 0.32 makes them in a run that it leaves out there, and then fails at the first request.
    """
    from vllm.distributed.parallel_state import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def stages() -> tuple[bool, bool]:
    """Whether this worker is the first pipeline stage, and whether it is the last."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    return bool(group.is_first_rank), bool(group.is_last_rank)


def is_missing(module: nn.Module) -> bool:
    """Whether a module is only the place of one that another pipeline stage holds."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(module, PPMissingLayer)


def step_rows(worker: Any) -> Iterator[tuple[str, int, int, int]]:
    """``(request, first row, one past the last, absolute position of the first)`` of the step about to run."""
    runner = worker.model_runner
    batch = runner.input_batch
    bounds = runner.query_start_loc.np
    computed = batch.num_computed_tokens_cpu
    for i in range(batch.num_reqs):
        yield batch.req_ids[i], int(bounds[i]), int(bounds[i + 1]), int(computed[i])


def extra_args(worker: Any, request: str) -> Mapping[str, Any] | None:
    """``SamplingParams.extra_args`` of a request that the worker knows."""
    state = worker.model_runner.requests.get(request)
    params = None if state is None else state.sampling_params
    return None if params is None else params.extra_args


def knows(worker: Any, request: str) -> bool:
    """Whether a request is not over yet."""
    return request in worker.model_runner.requests


def attention_of(module: nn.Module) -> nn.Module | None:
    """vLLM's attention layer inside a block's attention module."""
    from vllm.model_executor.layers.attention import Attention

    return next((part for part in module.modules() if isinstance(part, Attention)), None)


def kernel_terms(attention: Any) -> dict[str, Any]:
    """What the kernel of an attention layer applies: scale, softcap, window, sinks, ALiBi slopes, sizes."""
    impl = attention.impl
    window = getattr(attention, "sliding_window", None)
    return {
        "scale": float(impl.scale),
        "softcap": getattr(impl, "logits_soft_cap", None) or None,
        "window": None if window is None or window <= 0 else int(window),
        "sinks": getattr(impl, "sinks", None),
        "alibi": getattr(impl, "alibi_slopes", None),
        "heads": int(attention.num_heads),
        "kv_heads": int(attention.num_kv_heads),
        "width": int(attention.head_size),
    }


def _head(model: Any) -> tuple[Any, Any]:
    """The unembedding and the layer that calls it, of a text model or of the text model inside a wrapper."""
    for owner in (model, getattr(model, "language_model", None)):
        if owner is not None and hasattr(owner, "logits_processor"):
            head = getattr(owner, "lm_head", None)
            return owner.logits_processor, head if head is not None else embedding(owner)
    raise AttributeError(f"{type(model).__name__} has no logits processor")


def embedding(model: nn.Module) -> nn.Module:
    """The vocabulary embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return next(part for part in model.modules() if isinstance(part, VocabParallelEmbedding))


def set_head_terms(model: nn.Module, multiplier: float, softcap: float | None) -> None:
    """Make the multiplier and the softcap of logits the family's own, where vLLM has another."""
    processor, _ = _head(model)
    if abs(processor.scale - multiplier) > 1e-6 * multiplier:
        processor.scale = multiplier
    if processor.soft_cap != softcap:
        processor.soft_cap = softcap


def bare_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """``[rows, vocab]`` of final-norm rows, before softcap and multiplier, on every rank."""
    processor, head = _head(model)
    logits = all_gather(processor._apply_head(head, hidden, getattr(head, "bias", None)))
    return logits[..., : processor.org_vocab_size]


def finished_logits(model: Any, hidden: Tensor) -> Tensor | None:
    """``[rows, vocab]`` as the model samples from them; ``None`` on ranks that do not sample."""
    logits: Tensor | None = model.compute_logits(hidden)
    return logits


def route(experts: Any, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and indices ``[rows, top_k]`` by the model's own routing function.

    Raises:
        LookupError: its routing needs more than the logits.
    """
    router = experts.router
    if getattr(router, "custom_routing_function", None) is not None or getattr(router, "_hash_indices_table", None):
        raise LookupError("its routing depends on more than the router's logits")
    weights, indices = router._compute_routing(
        hidden_states=router_logits, router_logits=router_logits, indices_type=None
    )
    return weights, indices


def tensor_parallel() -> tuple[int, int]:
    """``(rank, size)`` of the tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def all_gather(rows: Tensor) -> Tensor:
    """Last axes of all tensor-parallel ranks, concatenated in rank order."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return rows
    gathered: Tensor = group.all_gather(rows.contiguous(), dim=-1)
    return gathered


def linear_kind(module: nn.Module) -> str:
    """How a projection is split over ranks: ``column``, ``merged``, ``qkv``, ``row`` or empty."""
    from vllm.model_executor.layers import linear

    kinds: Sequence[tuple[str, type]] = (
        ("qkv", linear.QKVParallelLinear),
        ("merged", linear.MergedColumnParallelLinear),
        ("column", linear.ColumnParallelLinear),
        ("row", linear.RowParallelLinear),
    )
    return next((kind for kind, cls in kinds if isinstance(module, cls)), "")


def on_load(around: Callable[[Any], None]) -> None:
    """Call ``around(worker)`` after each worker of this process has loaded its model."""
    from vllm.v1.worker.gpu_worker import Worker

    plain = Worker.load_model

    @functools.wraps(plain)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        around(self)

    Worker.load_model = load_model


def model_of_engine(llm: Any) -> dict[str, Any]:
    """Model, dtype and implementation of an engine that somebody else built."""
    config = llm.model_config
    return {
        "model": str(config.model),
        "dtype": str(config.dtype).removeprefix("torch."),
        "trust_remote_code": bool(config.trust_remote_code),
        "model_impl": str(getattr(config.model_impl, "value", config.model_impl)),
        "extension": str(llm.vllm_config.parallel_config.worker_extension_cls),
        "hooks": bool(config.enforce_eager),
    }


def no_gradients() -> Any:
    """The mode in which workers compute."""
    return torch.inference_mode()
