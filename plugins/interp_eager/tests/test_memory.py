"""What calls leave behind with the garbage collector off: nothing that waits for it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batches import UNEQUAL
from tiny_families import PROMPT

from interp_core import Add, Apply, InterpModel, RequestError, steer

POINTS = ["resid_post.0-3", "attn_probs.1", "lm_head"]
LONG = [[7] * 60, [9] * 50, [11] * 60]
MEGABYTE = 2**20


@contextmanager
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def alive() -> tuple[int, int]:
    """Objects that the collector knows of, and how many of them are tensors.

    What Python keeps for reuse, which grows to a limit while no collection runs, is not among them.
    """
    found = gc.get_objects()
    return len(found), sum(issubclass(type(one), torch.Tensor) for one in found)


def fails(model: InterpModel) -> None:
    def raises(rows: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    for call in (
        lambda: model.run_with_cache(PROMPT, ["resid_post.3"]),
        lambda: model.generate(UNEQUAL, max_tokens=3),
        lambda: list(model.generate_stream(PROMPT, max_tokens=3)),
    ):
        try:
            with steer(model, Apply("resid_post.1", raises)):
                call()
        except RequestError:
            continue
        raise AssertionError("nothing was raised")


def left(model: InterpModel) -> None:
    steps = model.generate_stream(PROMPT, max_tokens=20, ignore_eos=True)
    next(steps)


CALLS: dict[str, tuple[int, Callable[[InterpModel], Any]]] = {
    "captures": (200, lambda m: m.run_with_cache(LONG, POINTS)),
    "steered captures": (
        200,
        lambda m: m.run_with_cache(LONG, POINTS, steering=[Add("resid_post.1", torch.ones(m.d_model))]),
    ),
    "stopped forwards": (200, lambda m: m.run_with_cache(PROMPT, ["resid_post.0"])),
    "generations": (200, lambda m: m.generate(UNEQUAL, max_tokens=3, ignore_eos=True)),
    "generations with captures": (100, lambda m: m.capture_generation(UNEQUAL, POINTS, max_tokens=3, ignore_eos=True)),
    "streams that are left": (200, left),
    "failing calls": (50, fails),
}


@pytest.mark.parametrize("kind", CALLS)
def test_memory_stays_flat(kind: str, llama: InterpModel) -> None:
    count, call = CALLS[kind]
    for _ in range(5):
        call(llama)
    with uncollected():
        before, held = alive(), resident()
        for _ in range(count):
            call(llama)
        after, holds = alive(), resident()
    assert after[1] - before[1] < 10
    assert after[0] - before[0] < count
    # What one capture gives is 400 kB: were each kept, this would be 80 MB.
    assert holds - held < 24 * MEGABYTE


def test_calls_that_leave_cycles_would_be_seen(llama: InterpModel) -> None:
    def cyclic() -> None:
        held: list[Any] = [llama.run_with_cache(LONG, POINTS)]
        held.append(held)

    cyclic()
    with uncollected():
        before = alive()
        for _ in range(100):
            cyclic()
        after = alive()
    # Of the process's memory nothing is said: behind many tests it has free pages enough for all of these.
    assert after[1] - before[1] >= 100
    assert after[0] - before[0] >= 100


def test_what_was_given_goes_with_its_last_user(llama: InterpModel) -> None:
    with uncollected():
        cache = llama.run_with_cache(PROMPT, ["resid_post.1"])
        rows = weakref.ref(cache["resid_post.1"])
        del cache
        assert rows() is None
        steps = llama.generate_stream(PROMPT, max_tokens=9, ignore_eos=True)
        next(steps)
        batch = weakref.ref(steps.gi_frame.f_locals["run"].run.batch)  # type: ignore[attr-defined]
        found: Any = batch()
        keys = weakref.ref(found._cache.layers[0].keys)
        del found
        steps.close()  # type: ignore[attr-defined]
        assert keys() is None
        del steps
        assert batch() is None
