"""One generation on the engine, as the iterator of steps that the core works with."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

from interp_core.cancellation import check_cancelled
from interp_core.errors import BackendUnavailable
from interp_core.requests import ForwardRequest, ForwardResult, Step, TokenLogprob
from interp_vllm.engine import Engine

__all__ = ["VllmRun"]

_Item = tuple[Step, str | None] | BaseException


class VllmRun:
    """Begins at once. Steps wait in a queue until they are asked for; the engine does not wait for the caller."""

    def __init__(self, engine: Engine, request: ForwardRequest) -> None:
        engine.check(request)
        self._engine, self._request = engine, request
        self._name = engine.name()
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._reason: str | None = None
        self._given = 0
        self._rows: ForwardResult | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._driving = engine.submit(self._drive())

    @property
    def finish_reason(self) -> str | None:
        """Set once the last step was given."""
        return self._reason

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._reason is not None:
            raise StopIteration
        while True:
            try:
                item = self._items.get(timeout=0.1)
                break
            except queue.Empty:
                check_cancelled()
                if self._ended.is_set() and self._items.empty():
                    raise StopIteration from None
        if isinstance(item, BaseException):
            raise item
        step, self._reason = item
        self._given += 1
        return step

    def result(self) -> ForwardResult:
        """Rows of every position whose step was given (prompt + new - 1)."""
        self._end()
        if self._error is not None:
            raise self._error
        if self._rows is None:
            (self._rows,) = self._engine.wait(self._engine.collect([(self._name, self._request)]))
        count = len(self._request.token_ids) + max(self._given, 1) - 1
        return ForwardResult(rows={a: _first(a.name, rows, count) for a, rows in self._rows.rows.items()})

    def close(self) -> None:
        """End it; the worker forgets it."""
        self._end()
        if self._rows is None and (self._request.reads or self._request.writes):
            self._rows = ForwardResult()
            # An engine that is gone holds nothing.
            with contextlib.suppress(BackendUnavailable):
                self._engine.wait(self._engine.drop([self._name]))

    def _end(self) -> None:
        """Wait until nothing of it runs any more."""
        if not self._ended.is_set():
            self._driving.cancel()
            self._ended.wait(timeout=60)

    async def _drive(self) -> None:
        try:
            async for output in self._engine.steps(self._name, self._request):
                steps = list(_steps(output, self._request.n_logprobs))
                reason = output.outputs[0].finish_reason
                if reason is not None:
                    # Before the last step is given, so that an operation that failed is an error and not a token.
                    await self._keep_rows()
                for i, step in enumerate(steps):
                    self._items.put((step, reason if i == len(steps) - 1 else None))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
            self._items.put(error)
            raise
        finally:
            self._ended.set()

    async def _keep_rows(self) -> None:
        """Fetch the rows; a caller that ends the run meanwhile does not lose what the worker has handed over."""
        call = asyncio.ensure_future(self._engine.collect([(self._name, self._request)]))
        try:
            (self._rows,) = await asyncio.shield(call)
        except asyncio.CancelledError:
            (self._rows,) = await call
            raise


def _steps(output: Any, n_logprobs: int) -> Iterator[Step]:
    (completion,) = output.outputs
    for i, token in enumerate(completion.token_ids):
        logprobs: tuple[TokenLogprob, ...] = ()
        if n_logprobs and completion.logprobs:
            ranked = sorted(completion.logprobs[i].items(), key=lambda item: item[1].rank)
            logprobs = tuple(TokenLogprob(int(t), float(p.logprob)) for t, p in ranked[:n_logprobs])
        yield Step(token_id=int(token), logprobs=logprobs)


def _first(name: str, rows: Any, count: int) -> Any:
    return rows[..., :count, :count] if name in ("attn_scores", "attn_probs") else rows[:count]
