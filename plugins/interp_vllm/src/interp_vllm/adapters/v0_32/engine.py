"""vLLM 0.32 in the process that asks: an engine's start and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from interp_vllm.adapters.quiet import quiet

__all__ = [
    "client_errors",
    "cpu_head_sizes",
    "longest",
    "model_of_engine",
    "start_engine",
    "stop_engine",
]

_PATIENCE: Final = 30.0
"""Seconds that an engine's processes get to end by themselves."""


def start_engine(arguments: Mapping[str, Any]) -> Any:
    """An ``AsyncLLM``; to be called on the loop that will serve it.

    Args:
        arguments: keyword arguments of vLLM's ``EngineArgs``.
    """
    with quiet(), _without_main(), _environment_kept():
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


def cpu_head_sizes() -> tuple[int, ...]:
    """Widths of heads that the attention kernel for CPUs takes."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return tuple(CPUAttentionBackend.get_supported_head_sizes())


def longest(llm: Any) -> int:
    """Most tokens of one sequence."""
    return int(llm.model_config.max_model_len)


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


@contextmanager
def _environment_kept() -> Iterator[None]:
    """What vLLM sets in the environment for one engine and its processes must not reach the next one.

    For some models it switches compilation off that way, and a later engine would be compiled no more.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def stop_engine(llm: Any) -> None:
    """End an ``AsyncLLM`` and its processes, from any thread but its loop's."""
    from vllm.utils.async_utils import cancel_task_threadsafe

    if llm.output_handler is not None:
        # Else it takes the end of the processes for a crash, and says so.
        cancel_task_threadsafe(llm.output_handler)
    # Its default kills what has not gone within five seconds, and then its shared memory stays behind.
    llm.shutdown(timeout=_PATIENCE)


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
