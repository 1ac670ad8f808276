"""A vLLM engine on the background loop: started, asked, and shut down; its processes reaped."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import uuid
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interp_core.errors import BackendUnavailable, InterpError, ModelUnavailable, RequestError
from interp_core.requests import ForwardRequest, ForwardResult
from interp_vllm.adapters import adapter
from interp_vllm.liveness import Liveness, end_processes
from interp_vllm.loop import finished, submit
from interp_vllm.payload import discard_payload, discard_payloads_of, read_payload, write_payload
from interp_vllm.sampling import sampling_params
from interp_vllm.wire import encode_request

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Engine"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_GROUP: Final = 256
"""Forwards whose rows wait in the worker at once."""

_LIVE: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """One ``AsyncLLM``. Coroutines run on the background loop; nothing here blocks it but the start."""

    def __init__(
        self, model_id: str, arguments: Mapping[str, Any], end_tokens: frozenset[int], *, llm: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        self.model_id = model_id
        self.arguments = dict(arguments)
        self.end_tokens = end_tokens
        self.max_length = 0
        self._loop = loop
        self._owned = llm is None
        self._llm: Any = llm
        self._workers: list[Any] = []
        self._life = Liveness(model_id)
        self._numbers = itertools.count()
        self._tag = uuid.uuid4().hex[:8]

    # Its life.

    async def start(self) -> None:
        """Build the engine, and find the model's modules in its workers.

        Raises:
            BackendUnavailable: vLLM cannot run here, or would compute something else than the configuration says.
            ModelUnavailable: vLLM could not load the checkpoint.
        """
        import psutil

        names = _names()
        try:
            if self._owned:
                _LOG.info("%s: starting a vLLM engine, which takes half a minute or more", self.model_id)
                self._llm = names.start_engine(self.arguments)
            self.max_length = names.longest(self._llm)
        except InterpError:
            raise
        except Exception as error:
            raise ModelUnavailable(f"{self.model_id}: vLLM did not start: {_reason(error)}") from error
        _LIVE.add(self)
        self._life.watch(self._llm)
        if self._owned and "worker_extension_cls" not in self.arguments:
            return
        for status, text, pid in await self._rpc("interp_attach"):
            self._workers.append(psutil.Process(pid))
            if status != "ok":
                self.stop()
                raise BackendUnavailable(f"{self.model_id}: {text}")

    def stop(self) -> None:
        """End the engine's processes. May be called twice."""
        llm, self._llm = self._llm, None
        self._life.unwatch()
        if llm is not None and self._owned:
            _names().stop_engine(llm)
            end_processes(self._workers)
            discard_payloads_of([worker.pid for worker in self._workers])
        _LIVE.discard(self)

    # From other threads.

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin one of the coroutines below on the engine's loop."""
        return submit(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; a cancelled or interrupted caller cancels it.

        Raises:
            RequestError: called on the engine's own loop, which would wait for itself.
        """
        if self._loop is not None and _running_loop() is self._loop:
            work.close()
            raise RequestError("this engine runs on this thread's event loop: await model.aio's methods instead")
        return finished(self.submit(work))

    # Requests.

    async def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """Forwards over prompts, together; rows come back when the last of a group is through."""
        results: list[ForwardResult] = []
        for first in range(0, len(requests), _GROUP):
            results += await self._group(requests[first : first + _GROUP])
        return results

    async def _group(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        named = [(self.name(), request) for request in requests]
        try:
            async with asyncio.TaskGroup() as group:
                for name, request in named:
                    group.create_task(self._through(name, request))
        except BaseException as error:
            await self.drop([name for name, _ in named])
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return await self.collect(named)

    def check(self, request: ForwardRequest) -> Any:
        """vLLM's parameters of a request.

        Raises:
            RequestError: vLLM does not take them, such as a temperature above 2.
        """
        try:
            return sampling_params(request, self.end_tokens, whole=request.sampling is None)
        except Exception as error:
            raise RequestError(f"vLLM refuses this request: {_reason(error)}") from error

    async def steps(self, name: str, request: ForwardRequest) -> AsyncIterator[Any]:
        """vLLM's outputs, one per step, with what is new in each."""
        params = self.check(request)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        if request.reads or request.writes:
            params.extra_args = {"interp": encode_request(name, request)}
            # Nothing of it may come from, or go into, what plain requests share; and every row has to be computed.
            prompt["cache_salt"] = name
            params.skip_reading_prefix_cache = True
        llm = self._running()
        try:
            with self._life.in_flight():
                async for output in llm.generate(prompt, params, request_id=name):
                    yield output
        except _names().client_errors() as error:
            raise RequestError(f"vLLM refuses this request: {_reason(error)}") from error
        except InterpError:
            raise
        except Exception as error:
            raise BackendUnavailable(f"{self.model_id}: the vLLM engine failed: {_reason(error)}") from error

    async def collect(self, named: Sequence[tuple[str, ForwardRequest]]) -> list[ForwardResult]:
        """Rows of requests, which the worker forgets.

        Raises:
            RequestError: an operation failed inside the forward; other requests are not affected.
        """
        wanted = [name for name, request in named if request.reads or request.writes]
        if not wanted:
            return [ForwardResult() for _ in named]
        replies = await self._fetched("interp_collect", wanted)
        results, failure = [], ""
        for name, request in named:
            rows: dict[str, Tensor] = {}
            # Each pipeline stage gives the points that it holds, from its first tensor-parallel rank.
            for error, payload in (answer[1:] for reply in replies for answer in reply if answer[0] == name):
                failure = failure or error
                rows |= read_payload(payload) if payload else {}
            found = {read.address: rows[str(read.address)] for read in request.reads if str(read.address) in rows}
            results.append(ForwardResult(rows=found))
        if failure:
            raise RequestError(f"a request failed inside the forward: {failure}")
        return results

    async def drop(self, names: Sequence[str]) -> None:
        """Let the worker forget requests."""
        if self._llm is not None and names:
            await self._rpc("interp_drop", list(names))

    async def unembed(self, rows: Tensor, top: int) -> dict[str, Tensor]:
        """``logits``, or with ``top`` ``ids`` and ``probs``, of residual rows ``[rows, d_model]``."""
        payload = write_payload({"rows": rows.detach().cpu().contiguous()})
        try:
            replies = await self._fetched("interp_unembed", payload, top)
        finally:
            discard_payload(payload)
        error = next((error for error, _ in replies if error), "")
        if error:
            raise RequestError(f"the unembedding failed: {error}")
        return read_payload(next(found for _, found in replies if found))

    async def hooked(self, hooked: bool) -> None:
        """Serve a compiled engine by Python forwards and hooks, or by its graph again."""
        await self._rpc("interp_hooked", hooked)

    async def summary(self) -> list[dict[str, int]]:
        """What each worker holds."""
        found: list[dict[str, int]] = await self._rpc("interp_summary")
        return found

    def name(self) -> str:
        """An id for the next request."""
        return f"interp-{self._tag}-{next(self._numbers)}"

    async def _through(self, name: str, request: ForwardRequest) -> None:
        async for _ in self.steps(name, request):
            pass

    async def _fetched(self, method: str, *args: Any) -> Any:
        """A call whose answer lies in shared memory: if the caller goes away, the answer is thrown away too."""
        call = asyncio.ensure_future(self._rpc(method, *args))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(_thrown_away)
            raise

    async def _rpc(self, method: str, *args: Any) -> Any:
        try:
            with self._life.in_flight():
                return await self._running().collective_rpc(method, args=args)
        except InterpError:
            raise
        except Exception as error:
            raise BackendUnavailable(f"{self.model_id}: the vLLM engine failed: {_reason(error)}") from error

    def _running(self) -> Any:
        self._life.require()
        if self._llm is None:
            raise BackendUnavailable("this model was shut down; load it again")
        return self._llm


def _names() -> Any:
    return adapter()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _thrown_away(call: asyncio.Future[Any]) -> None:
    if call.cancelled() or call.exception() is not None:
        return
    for reply in call.result():
        # Either one answer, or a list of them, each ending in its payload.
        for answer in reply if reply and isinstance(reply[0], list) else [reply]:
            discard_payload(answer[-1])


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


_OWNER = os.getpid()


@atexit.register
def _stop_all() -> None:
    # Children of a fork inherit this list, and must not end the engines of their parent.
    if os.getpid() == _OWNER:
        for engine in list(_LIVE):
            engine.stop()
