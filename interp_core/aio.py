"""The awaitable twin of a model: the same calls, run beside the event loop.

A synchronous backend's work runs on a worker thread, one caller at a time; context variables, and so
``steer`` blocks, are carried along. Nothing here repeats a signature: each method wraps its twin.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from interp_core.model import InterpModel

if TYPE_CHECKING:
    from interp_core.results import GenStep

__all__ = ["AioModel"]

_END = object()


def _awaitable(name: str) -> Callable[..., Awaitable[Any]]:
    twin = getattr(InterpModel, name)

    @functools.wraps(twin)
    async def method(self: AioModel, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(getattr(self.model, name), *args, **kwargs)
        return await anyio.to_thread.run_sync(call)

    method.__signature__ = inspect.signature(twin)  # type: ignore[attr-defined]
    return method


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
    decode_residuals = _awaitable("decode_residuals")
    logit_lens = _awaitable("logit_lens")
    verify = _awaitable("verify")

    async def generate_stream(self, tokens: Any, **options: Any) -> AsyncIterator[GenStep]:
        """As :func:`interp_core.generate_stream`, with ``async for``. Leaving it early ends the generation."""
        steps = self.model.generate_stream(tokens, **options)
        try:
            while True:
                step: Any = await anyio.to_thread.run_sync(next, steps, _END)
                if step is _END:
                    return
                yield step
        finally:
            # A cancelled task must still free the generation's cache.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(steps.close)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        # Questions that need no work (facts, points(), profile, ...) are the model's own, not awaited.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.model, name)
