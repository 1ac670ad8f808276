"""The awaitable twin: the same signatures, work off the event loop, and a cancelled stream that is closed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import LlamaConfig

from interp_core import Add, BackendSpec, GenStep, InterpModel, PluginHost, RequestError, hookimpl, load_model
from interp_core.aio import AioModel
from interp_core.points import GENERAL_POINTS, hook
from interp_core.requests import ForwardRequest, ForwardResult, Step
from interp_core.session import Session

torch.set_num_threads(1)
AWAITED = (
    "warmup shutdown run_with_cache capture_generation generate capture_attention decode_residuals logit_lens verify "
    "harvest"
).split()


class Run:
    """Counts up from the last token of the prompt."""

    def __init__(self, request: ForwardRequest) -> None:
        assert request.sampling is not None
        self.request, self.left, self.next = request, request.sampling.max_tokens, request.token_ids[-1] + 1
        self.finish_reason: str | None = None
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self.left or self.closed.is_set():
            raise StopIteration
        self.left, self.next = self.left - 1, self.next + 1
        if not self.left:
            self.finish_reason = "length"
        return Step(token_id=self.next - 1)

    def result(self) -> ForwardResult:
        return ForwardResult()

    def close(self) -> None:
        self.closed.set()


class Fake:
    def __init__(self, *_: Any) -> None:
        self.requests: list[ForwardRequest] = []
        self.runs: list[Run] = []
        self.threads: set[int] = set()
        self.down = 0

    def warmup(self) -> None:
        self.threads.add(threading.get_ident())

    def shutdown(self) -> None:
        self.down += 1

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        self.threads.add(threading.get_ident())
        self.requests += requests
        return [
            ForwardResult(rows={read.address: torch.ones(len(r.token_ids), 8) for read in r.reads}) for r in requests
        ]

    def generate(self, request: ForwardRequest) -> Run:
        self.threads.add(threading.get_ident())
        self.requests.append(request)
        self.runs.append(Run(request))
        return self.runs[-1]

    def unembed(self, rows: Any, *, raw: bool) -> Any:
        return rows @ torch.ones(8, 64) + float(raw)


class Plugin:
    @hookimpl
    def interp_backends(self) -> list[BackendSpec]:
        points = {name: hook() for name in GENERAL_POINTS}
        capabilities = {"capture", "steer", "logit_lens", "raw_logits"}
        return [BackendSpec(name="b", summary="x", factory="nowhere:B", points=points, capabilities=capabilities)]


@pytest.fixture
def model(tmp_path: Path) -> InterpModel:
    LlamaConfig(vocab_size=64, hidden_size=8, num_hidden_layers=2, num_attention_heads=2).save_pretrained(tmp_path)
    profile = load_model(tmp_path, "b", host=PluginHost(discover=False, plugins=[("p", Plugin())])).profile
    fake = Fake()
    return InterpModel(profile, Session(profile, make=lambda *_: fake))


def fake_of(model: InterpModel) -> Fake:
    found = model.session.backend()
    assert isinstance(found, Fake)
    return found


@pytest.mark.parametrize("name", AWAITED)
def test_signatures_are_the_twins(name: str) -> None:
    method = getattr(AioModel, name)
    assert inspect.iscoroutinefunction(method)
    assert inspect.signature(method) == inspect.signature(getattr(InterpModel, name))
    assert method.__doc__ == getattr(InterpModel, name).__doc__


def test_work_is_done_beside_the_event_loop(model: InterpModel) -> None:
    async def main() -> int:
        aio = model.aio
        await aio.warmup()
        cache = await aio.run_with_cache([[1, 2, 3], [4]], ["resid_post.1"])
        assert cache["resid_post.1"].shape == (2, 3, 8)
        completion = await aio.generate([1, 2], max_tokens=3)
        assert (completion.token_ids, completion.finish_reason, completion.text) == ((3, 4, 5), "length", None)
        assert (await aio.decode_residuals(torch.ones(2, 8))).shape == (2, 64)
        assert (aio.n_layers, aio.backend, aio.supports("capture")) == (2, "b", True)
        return threading.get_ident()

    loop = anyio.run(main)
    assert loop not in fake_of(model).threads


def test_steering_blocks_are_carried_along(model: InterpModel) -> None:
    async def main() -> None:
        with model.steer(Add("resid_post.0", torch.ones(8))):
            await model.aio.run_with_cache([1], ["resid_post.1"])
        await model.aio.run_with_cache([1], ["resid_post.1"])

    anyio.run(main)
    assert [len(r.writes) for r in fake_of(model).requests] == [1, 0]


def test_errors_come_through(model: InterpModel) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="nothing to run"):
            await model.aio.generate([], max_tokens=1)
        with pytest.raises(RequestError, match="max_tokens"):
            async for _ in model.aio.generate_stream([1], max_tokens=0):
                pass

    anyio.run(main)


def test_a_stream_to_its_end(model: InterpModel) -> None:
    async def main() -> list[GenStep]:
        return [step async for step in model.aio.generate_stream([1, 2], max_tokens=3)]

    assert [step.token_id for step in anyio.run(main)] == [3, 4, 5]
    assert fake_of(model).runs[0].closed.is_set()


def test_a_stream_left_early_is_closed(model: InterpModel) -> None:
    async def main() -> None:
        stream = model.aio.generate_stream([1], max_tokens=50)
        async for step in stream:
            if step.token_id == 4:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    anyio.run(main)
    (run,) = fake_of(model).runs
    assert run.closed.is_set()
    assert run.left == 47


def test_a_cancelled_stream_is_closed(model: InterpModel) -> None:
    async def main() -> bool:
        with anyio.CancelScope() as scope:
            async for step in model.aio.generate_stream([1], max_tokens=60):
                if step.token_id == 5:
                    scope.cancel()
        return scope.cancelled_caught

    assert anyio.run(main)
    (run,) = fake_of(model).runs
    assert run.closed.is_set()
    assert run.left > 0


def test_many_at_once_and_shutdown(model: InterpModel) -> None:
    found: dict[int, tuple[int, ...]] = {}

    async def one(start: int) -> None:
        found[start] = (await model.aio.generate([start], max_tokens=4)).token_ids

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for start in range(8):
                group.start_soon(one, start)
        await model.aio.shutdown()

    fake = fake_of(model)
    anyio.run(main)
    assert found == {n: tuple(range(n + 1, n + 5)) for n in range(8)}
    assert fake.down == 1


def test_private_names_are_not_passed_on(model: InterpModel) -> None:
    with pytest.raises(AttributeError):
        _ = model.aio._tokenizer
