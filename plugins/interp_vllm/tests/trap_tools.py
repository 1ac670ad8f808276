"""What the tests of vLLM's traps share: prompts, requests, and how a worker is asked what it holds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interp_core import (
    Add,
    Cache,
    InterpModel,
    run_with_cache,
    steer,
)
from interp_core.address import parse_address
from interp_core.checks import difference
from interp_core.requests import ForwardRequest, ForwardResult, Read, Sampling, Where, Write
from interp_vllm.engine import Engine
from interp_vllm.loop import finished, submit

__all__ = [
    "BLOCK",
    "CLOSE",
    "D_MODEL",
    "EMPTY",
    "FAR",
    "LAST",
    "LISTED",
    "ONE_ROW_LEFT",
    "POINTS",
    "TOGETHER",
    "assert_settled",
    "captured",
    "counted",
    "driven",
    "engine_of",
    "generated",
    "held",
    "in_threads",
    "plain_tokens",
    "prompt",
    "push",
    "request",
    "worst",
    "writing",
]

CLOSE = 1e-5
FAR = 1e-3
D_MODEL = 96
BLOCK = 32
EMPTY = {"requests": 0, "sites": 0, "bytes": 0}
LISTED = [f"resid_post.{i}" for i in range(4)]
POINTS = ["resid_post.*", "z.*", "mlp_act.*", "lm_head", "attn_probs.*"]
LAST = "resid_post.3"


def prompt(length: int, seed: int) -> list[int]:
    """Ids that are neither special nor the same for two seeds."""
    drawn = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


TOGETHER = [prompt(20, 1), prompt(70, 2), prompt(200, 3), prompt(33, 4)]
ONE_ROW_LEFT = [prompt(33, 5)]


def push(k: float = 1.0, point: str = "resid_post.1") -> Add:
    return Add(point, torch.linspace(-1, 1, D_MODEL).roll(int(k) * 7), scale=3.0 * k)


def engine_of(model: InterpModel) -> Engine:
    backend: Any = model.session.backend()
    found: Engine = backend.engine
    return found


def held(model: InterpModel) -> list[dict[str, int]]:
    summary = finished(submit(engine_of(model).summary()))
    return [{name: worker[name] for name in EMPTY} for worker in summary]


def counted(model: InterpModel, name: str) -> int:
    return sum(worker[name] for worker in finished(submit(engine_of(model).summary())))


def assert_settled(model: InterpModel, seconds: float = 30.0) -> None:
    """Nothing is left in any worker; a task that was cancelled may need a moment to say so."""
    until = time.monotonic() + seconds
    while held(model) != [EMPTY] and time.monotonic() < until:
        time.sleep(0.02)
    assert held(model) == [EMPTY]


def worst(got: Cache, want: Cache) -> float:
    """The largest relative difference of any prompt at any address."""
    assert list(got) == list(want)
    assert got.lengths == want.lengths
    found = 0.0
    for address in want:
        for i, n in enumerate(want.lengths):
            part = (i, ..., slice(n), slice(n)) if address.name == "attn_probs" else (i, slice(n))
            found = max(found, difference(got[address][part], want[address][part]))
    return found


def captured(model: InterpModel, prompts: Any, points: Sequence[str] = POINTS, *operations: Any, **where: Any) -> Cache:
    if not operations:
        return run_with_cache(model, prompts, points)
    with steer(model, operations, **where):
        return run_with_cache(model, prompts, points)


def generated(
    model: InterpModel, prompts: Any, count: int, points: Sequence[str], *operations: Any, **where: Any
) -> tuple[list[tuple[int, ...]], Cache]:
    with steer(model, operations, **where) if operations else contextlib.nullcontext():
        completions, cache = model.capture_generation(prompts, points, max_tokens=count, ignore_eos=True)
    return [c.token_ids for c in (completions if isinstance(completions, list) else [completions])], cache


def request(tokens: Sequence[int], *, reads: Sequence[str] = (), writes: Sequence[Write] = (), new: int = 0) -> Any:
    return ForwardRequest(
        token_ids=tuple(tokens),
        reads=tuple(Read(address=parse_address(r)) for r in reads),
        writes=tuple(writes),
        sampling=Sampling(max_tokens=new, stop_token_ids=frozenset()) if new else None,
    )


def writing(operation: Any) -> Write:
    return Write(operation=operation, address=operation.address, where=Where())


async def driven(engine: Engine, wanted: ForwardRequest) -> tuple[list[int], int, ForwardResult]:
    """New tokens, how many of the prompt's came from the cache, and rows."""
    name, tokens, cached = engine.name(), [], 0
    async for output in engine.steps(name, wanted):
        tokens += output.outputs[0].token_ids
        cached = max(cached, output.num_cached_tokens or 0)
    (result,) = await engine.collect([(name, wanted)])
    return tokens, cached, result


# Chunks of a long prompt.


def in_threads(works: Sequence[Callable[[], Any]]) -> None:
    """Run all at once; what one raises is raised here."""
    failures: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  Raised below.
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if failures:
        raise failures[0]


def plain_tokens(model: InterpModel, tokens: Sequence[int]) -> tuple[int, ...]:
    found: tuple[int, ...] = model.generate(tokens, max_tokens=6, ignore_eos=True).token_ids
    return found
