"""The running side of a model: its backend object, made at first use, and one caller at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from attrs import define, field

from interp_core.backend import Backend, BatchBackend, LensBackend, make_backend
from interp_core.errors import BackendUnavailable, InterpError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.profile import ModelProfile
    from interp_core.requests import ForwardRequest, ForwardResult, GenerationRun, Step

__all__ = ["Session", "lock_of"]


@define(eq=False)
class CallerLock:
    """One caller at a time. A caller that is inside already (a hook calling its own model) is refused, not hung."""

    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _owner: int | None = field(default=None, init=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside the block.

        Raises:
            RequestError: this thread holds it already.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise RequestError("a hook or operation called the model that is running it; use results of earlier calls")
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None


_OF_NETWORKS: Final[WeakKeyDictionary[Any, CallerLock]] = WeakKeyDictionary()


def lock_of(network: Any) -> CallerLock:
    """The lock of a network in memory, one for all models that wrap it: hooks of one would act in another."""
    try:
        return _OF_NETWORKS.setdefault(network, CallerLock())
    except TypeError:  # What cannot be referred to weakly is nothing that hooks could be on.
        return CallerLock()


@define(eq=False)
class Session:
    """Owns a backend object. Locks are held per call and per generated step, never while the caller thinks."""

    profile: ModelProfile
    make: Callable[..., Backend] = make_backend
    _backend: Backend | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _lock: CallerLock = field(factory=CallerLock, alias="lock")

    @property
    def warm(self) -> bool:
        """Whether weights are loaded."""
        return self._backend is not None

    def warmup(self) -> None:
        """Load the weights, unless they are loaded.

        Raises:
            BackendUnavailable: the backend cannot run here.
            ModelUnavailable: the weights are missing or corrupt. Nothing is left half loaded.
        """
        with self._lock.held():
            self._ready()

    def adopt(self, backend: Backend) -> None:
        """Use a backend object that is warm already."""
        with self._lock.held():
            self._backend = backend

    def shutdown(self) -> None:
        """Free everything; the model cannot be used again. May be called twice."""
        with self._lock.held():
            backend, self._backend, self._closed = self._backend, None, True
            if backend is not None:
                backend.shutdown()

    @property
    def concurrent(self) -> bool:
        """Whether requests begun together run together."""
        return self.profile.spec.concurrent

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """Run requests without sampling."""
        with self._turn() as backend:
            return backend.run(requests)

    def generate(self, request: ForwardRequest) -> GenerationRun:
        """Begin a request with sampling."""
        with self._turn() as backend:
            run = backend.generate(request)
        return run if self.concurrent else LockedRun(run, self._lock)

    def generate_together(self, requests: Sequence[ForwardRequest]) -> list[Mapping[int, GenerationRun]]:
        """Begin requests with sampling, in the batches that the backend makes of them; see :class:`BatchBackend`."""
        with self._turn() as backend:
            if self.concurrent:
                return [_at_once(backend, requests)]
            if isinstance(backend, BatchBackend):
                batches = backend.generate_together(requests)
            else:
                batches = [{i: backend.generate(request)} for i, request in enumerate(requests)]
        return [{i: LockedRun(run, self._lock) for i, run in batch.items()} for batch in batches]

    def unembed(self, rows: Any, *, raw: bool) -> Tensor:
        """Logits of residual rows."""
        with self._turn() as backend:
            logits: Tensor = backend.unembed(rows, raw=raw)
            return logits

    def top_tokens(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Most likely tokens of residual rows and their probabilities; see :class:`LensBackend`."""
        with self._turn() as backend:
            if isinstance(backend, LensBackend):
                return backend.top_tokens(rows, count)
            best = backend.unembed(rows, raw=False).float().softmax(-1).topk(count, dim=-1)
            return best.indices, best.values

    def backend(self) -> Backend:
        """The backend object, warm. For tests and for capabilities that a backend adds."""
        with self._lock.held():
            return self._ready()

    @contextmanager
    def _turn(self) -> Iterator[Backend]:
        """The backend, for one caller at a time unless it takes several."""
        if self.concurrent:
            yield self._warm()
        else:
            with self._lock.held():
                yield self._ready()

    def _warm(self) -> Backend:
        # Whoever finds it warm passes without waiting for another's turn.
        backend = self._backend
        if backend is not None:
            return backend
        with self._lock.held():
            return self._ready()

    def _ready(self) -> Backend:
        if self._closed:
            raise BackendUnavailable("this model was shut down; load it again")
        if self._backend is None:
            backend = self._made()
            try:
                backend.warmup()
            except BaseException:
                backend.shutdown()
                raise
            self._backend = backend
        return self._backend

    def _made(self) -> Backend:
        spec = self.profile.spec
        try:
            return self.make(spec, self.profile, self.profile.options)
        except InterpError:
            raise
        except ImportError as error:
            raise BackendUnavailable(
                f"backend {spec.name!r} (of {spec.owner}) is installed, but what it needs is missing: {error}"
            ) from error


def _at_once(backend: Backend, requests: Sequence[ForwardRequest]) -> Mapping[int, GenerationRun]:
    """All of them begun, or none."""
    runs: dict[int, GenerationRun] = {}
    try:
        for i, request in enumerate(requests):
            runs[i] = backend.generate(request)
    except BaseException:
        for run in runs.values():
            run.close()
        raise
    return runs


@define(eq=False)
class LockedRun:
    """A generation whose every step holds the session's lock, and nothing in between."""

    run: GenerationRun
    lock: CallerLock

    @property
    def finish_reason(self) -> str | None:
        """As the run says."""
        return self.run.finish_reason

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        with self.lock.held():
            return next(self.run)

    def result(self) -> ForwardResult:
        """Rows so far."""
        return self.run.result()

    def close(self) -> None:
        """End it."""
        self.run.close()
