"""Whether an engine's process still lives, for callers who would wait for one that does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from interp_core.errors import BackendUnavailable

__all__ = ["Liveness", "end_processes"]

_EVERY: Final = 0.5
"""Seconds between two looks at the engine."""


class Liveness:
    """Watches one ``AsyncLLM``. Where its process is killed, vLLM marks it and lets its callers wait for ever."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._waiting: set[asyncio.Task[Any]] = set()
        self._watched: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._dead = False

    def watch(self, llm: Any) -> None:
        """Begin to watch; to be called on the engine's loop."""
        self._watched = llm
        self._watching = asyncio.create_task(self._watch())

    def unwatch(self) -> None:
        """The engine is ended on purpose: who still waits is told at the next look."""
        self._watched = None

    def require(self) -> None:
        """Refuse where the process has ended.

        Raises:
            BackendUnavailable: it has.
        """
        if self._dead:
            raise BackendUnavailable(f"{self._model_id}: the vLLM engine's process has ended; load the model again")

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """While this task waits for the engine, the engine's end ends the wait."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self.require()
            raise
        finally:
            self._waiting.discard(task)

    async def _watch(self) -> None:
        while self._watched is not None and not self._watched.errored:
            await asyncio.sleep(_EVERY)
        self._dead = True
        for task in list(self._waiting):
            task.cancel()


def end_processes(processes: Sequence[Any]) -> None:
    """End what is left of an engine whose own end did not reach its workers."""
    import psutil

    left = [process for process in processes if process.is_running()]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(left, timeout=5)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
