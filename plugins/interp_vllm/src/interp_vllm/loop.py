"""One event loop on one background thread, shared by all engines of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from interp_core.cancellation import check_cancelled

__all__ = ["background_loop", "finished", "submit"]

T = TypeVar("T")


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The loop, started at first use."""
    loop = asyncio.new_event_loop()
    # A daemon: an engine that was not shut down must not keep the interpreter from ending.
    threading.Thread(target=loop.run_forever, name="interp-vllm", daemon=True).start()
    return loop


def submit(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> Future[T]:
    """Begin ``work`` on a loop, by default the background one."""
    return asyncio.run_coroutine_threadsafe(work, background_loop() if loop is None else loop)


def finished(future: Future[T]) -> T:
    """Wait for it; a cancelled caller, or an interrupted one, cancels it."""
    try:
        while not future.done():
            check_cancelled()
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=0.1)
    except BaseException:
        future.cancel()
        raise
    return future.result()
