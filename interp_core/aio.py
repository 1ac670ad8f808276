"""The awaitable twin of a model: the same calls, run beside the event loop.

A synchronous backend's work runs on a worker thread, one caller at a time; context variables, and so
``steer`` blocks, are carried along. Nothing here repeats a signature: each method wraps its twin.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from interp_core.cancellation import CANCELLED
from interp_core.model import InterpModel

if TYPE_CHECKING:
    from interp_core.results import GenStep

__all__ = ["AioModel"]

_END = object()


def _awaitable(name: str) -> Callable[..., Awaitable[Any]]:
    twin = getattr(InterpModel, name)

    @functools.wraps(twin)
    async def method(self: AioModel, *args: Any, **kwargs: Any) -> Any:
        gone = threading.Event()
        token = CANCELLED.set(gone)
        try:
            return await anyio.to_thread.run_sync(functools.partial(getattr(self.model, name), *args, **kwargs))
        except BaseException:
            # A cancelled caller leaves its thread behind: tell it to end at the next token.
            gone.set()
            raise
        finally:
            CANCELLED.reset(token)

    method.__signature__ = inspect.signature(twin)  # type: ignore[attr-defined]
    return method


class _Steps:
    """A synchronous stream, taken step by step in worker threads, and closed only between steps."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self._lock = threading.Lock()

    def next(self) -> Any:
        with self._lock:
            return next(self._steps, _END)

    def close(self) -> None:
        with self._lock:
            self._steps.close()


class AioModel:
    """``model.aio``: await what the model's methods return; iterate streams with ``async for``."""

    def __init__(self, model: InterpModel) -> None:
        self.model = model

    warmup = _awaitable("warmup")
    shutdown = _awaitable("shutdown")
    run_with_cache = _awaitable("run_with_cache")
    capture_generation = _awaitable("capture_generation")
    generate = _awaitable("generate")
    capture_attention = _awaitable("capture_attention")
    attribute = _awaitable("attribute")
    sweep = _awaitable("sweep")
    direct_attribution = _awaitable("direct_attribution")
    decode_residuals = _awaitable("decode_residuals")
    logit_lens = _awaitable("logit_lens")
    verify = _awaitable("verify")
    harvest = _awaitable("harvest")

    def generate_stream(self, tokens: Any, **options: Any) -> AsyncIterator[GenStep]:
        """As :func:`interp_core.generate_stream`, with ``async for``. Leaving it early ends the generation.

        Everything is checked, and steering is fixed, when this is called.
        """
        return self._stepping(_Steps(self.model.generate_stream(tokens, **options)))

    async def _stepping(self, steps: _Steps) -> AsyncIterator[GenStep]:
        try:
            while True:
                step = await anyio.to_thread.run_sync(steps.next)
                if step is _END:
                    return
                yield step
        finally:
            # A cancelled task must still free the generation's cache; a step that still runs is waited for.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(steps.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def __getattr__(self, name: str) -> Any:
        # Questions that need no work (facts, points(), profile, ...) are the model's own, not awaited.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.model, name)
