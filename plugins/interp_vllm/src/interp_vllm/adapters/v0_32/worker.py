"""vLLM 0.32 in its worker: the model, the rows of a step, kernels, heads, routers and ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "all_gather",
    "attention_of",
    "bare_logits",
    "embedding",
    "extra_args",
    "finished_logits",
    "forward_terms",
    "is_missing",
    "kernel_terms",
    "knows",
    "linear_kind",
    "mend_pipeline",
    "model_of",
    "no_gradients",
    "on_forward",
    "on_load",
    "route",
    "run_python",
    "set_head_terms",
    "stages",
    "step_rows",
    "tensor_parallel",
]


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


def forward_terms(worker: Any) -> dict[str, Any]:
    """Most rows of one forward, and the dtype and device of its tensors."""
    runner = worker.model_runner
    tokens = int(worker.vllm_config.scheduler_config.max_num_batched_tokens)
    return {"tokens": tokens, "dtype": runner.model_config.dtype, "device": runner.device}


def run_python(model: nn.Module, python: bool) -> None:
    """Run the Python forward of a compiled model, or the compiled one again."""
    for module in model.modules():
        if hasattr(module, "do_not_compile"):
            setattr(module, "do_not_compile", python)  # noqa: B010  A module's attributes are tensors to a type checker.


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


def on_load(before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call ``before(worker)`` and ``after(worker)`` around each loading of a model in this process."""
    from vllm.v1.worker.gpu_worker import Worker

    plain = Worker.load_model

    @functools.wraps(plain)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self)
        plain(self, *args, **kwargs)
        after(self)

    Worker.load_model = load_model


def no_gradients() -> Any:
    """The mode in which workers compute."""
    return torch.inference_mode()
