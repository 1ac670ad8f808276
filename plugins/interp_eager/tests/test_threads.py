"""Callers on several threads: each gets what it gets alone, and the end of the model is an end for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from test_batches import UNEQUAL
from tiny_families import _GROUPED, PROMPT, save, write

from interp_core import Add, Apply, BackendUnavailable, Cache, InterpModel, RequestError, load_model, steer

POINT = "resid_post.1"
PATIENCE = 120.0


def push(model: InterpModel, k: int) -> Add:
    return Add(POINT, torch.linspace(-1, 1, model.d_model).roll(k), scale=1.0 + k)


def calls(model: InterpModel, k: int) -> list[Callable[[], Any]]:
    """One of each kind, on prompts of caller ``k``'s own."""
    prompt, batch = PROMPT[: 4 + k % 5], [row[k % 3 :] for row in UNEQUAL[: 2 + k % 3]]
    sampled: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.5, "seed": k}
    return [
        lambda: model.run_with_cache(batch, [POINT, "resid_post.3", "attn_probs.2"]),
        lambda: model.run_with_cache(prompt, ["lm_head", f"z.{k % 4}"], positions="last"),
        lambda: model.generate(batch, **sampled, n_logprobs=2),
        lambda: model.capture_generation(prompt, ["resid_post.3", "attn_scores.1"], max_tokens=4, ignore_eos=True),
        lambda: [(s.token_id, s.logits) for s in model.generate_stream(prompt, max_tokens=5, ignore_eos=True)],
        lambda: model.generate(prompt, n=3, **sampled),
        lambda: model.capture_attention(prompt, [k % 4])[k % 4].scores,
        lambda: model.logit_lens(prompt, [0, 3], top_k=3).top_probs,
        lambda: failure(model, prompt),
    ]


def failure(model: InterpModel, prompt: list[int]) -> str:
    def raises(rows: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"on purpose, for {len(prompt)} tokens")

    with steer(model, Apply(POINT, raises)), pytest.raises(RequestError, match="on purpose") as caught:
        model.run_with_cache(prompt, ["resid_post.3"])
    return str(caught.value)


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, whatever it is made of."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, Cache):
        return one.lengths == other.lengths and all(torch.equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def on_threads(work: Callable[[int], None], count: int) -> None:
    """Run ``work(0)``, ... each on a thread; nothing hangs and nothing is raised."""
    raised: list[BaseException] = []

    def guarded(k: int) -> None:
        try:
            work(k)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    if raised:
        raise raised[0]


def forever(call: Callable[[], Any]) -> None:
    while True:
        call()


def hooks(model: InterpModel) -> int:
    backend: Any = model.session.backend()
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backend.model.modules())


def test_eight_callers_get_what_each_gets_alone(llama: InterpModel) -> None:
    want, before = {}, hooks(llama)
    for k in range(8):
        with steer(llama, push(llama, k), generated=k % 2 == 0):
            want[k] = [call() for call in calls(llama, k)]
    assert not same(want[0], want[5])
    got: dict[int, list[Any]] = {k: [] for k in range(8)}

    def work(k: int) -> None:
        with steer(llama, push(llama, k), generated=k % 2 == 0):
            mine = calls(llama, k)
            # Each begins with another kind of call.
            found = {i: mine[i]() for i in [*range(k, len(mine)), *range(k)]}
        got[k] = [found[i] for i in range(len(mine))]

    on_threads(work, 8)
    for k in range(8):
        for kind, (mine, alone) in enumerate(zip(got[k], want[k], strict=True)):
            assert same(mine, alone), (k, kind)
    assert hooks(llama) == before


def test_steps_of_several_streams_may_alternate(llama: InterpModel) -> None:
    want = {k: list(stream(llama, k)) for k in range(8)}
    got: dict[int, list[Any]] = {k: [] for k in range(8)}
    turn = threading.Barrier(8)

    def work(k: int) -> None:
        for step in stream(llama, k):
            got[k].append(step)
            turn.wait(PATIENCE)

    on_threads(work, 8)
    assert all(same(got[k], want[k]) for k in range(8))


def stream(model: InterpModel, k: int) -> Any:
    with steer(model, push(model, k)):
        steps = model.generate_stream(PROMPT[: 3 + k], max_tokens=6, ignore_eos=True)
    return ((step.token_id, step.logits) for step in steps)


@pytest.mark.parametrize("kept", [True, False])
def test_a_state_in_modules_is_of_one_generation_alone(kept: bool, folders: Path, monkeypatch: Any) -> None:
    """RecurrentGemma has its states in its modules, where the next call finds them."""
    small = {**_GROUPED, "lru_width": 48, "attention_window_size": 4, "block_types": ["recurrent", "attention"]}
    folder = write(lambda: hf.RecurrentGemmaConfig(**small), folders / "threads-recurrent_gemma")
    with load_model(folder, "eager", dtype="float32") as model:
        backend: Any = model.warmup().session.backend()
        assert len(backend.places) == 4
        alone = logits(model, PROMPT), logits(model, PROMPT[:1])
        if not kept:
            monkeypatch.setattr(backend, "places", ())
        beside = logits(model, PROMPT, between=lambda: model.generate(PROMPT[:3], max_tokens=2, ignore_eos=True))
        after = logits(model, PROMPT[:1])
    assert torch.equal(beside, alone[0]) is kept
    assert torch.equal(after, alone[1]) is kept


def logits(model: InterpModel, prompt: list[int], between: Callable[[], Any] = lambda: None) -> torch.Tensor:
    """Of each step of a stream, with another call behind each."""
    found = []
    for step in model.generate_stream(prompt, max_tokens=5, ignore_eos=True):
        found.append(step.logits)
        between()
    return torch.stack([row for row in found if row is not None])


def test_what_waits_for_a_long_generation_gets_its_turn(llama: InterpModel) -> None:
    steps, ended = 0, threading.Event()

    def generate() -> None:
        nonlocal steps
        while not ended.is_set():
            for _ in llama.generate_stream(PROMPT[:3], max_tokens=60, ignore_eos=True):
                steps += 1

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    try:
        waited = []
        for _ in range(10):
            before = steps
            llama.run_with_cache(PROMPT, [POINT])
            waited.append(steps - before)
    finally:
        ended.set()
        thread.join(PATIENCE)
    # Between two tokens, and not after the last one.
    assert sorted(waited)[5] < 20
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["stream", "batch", "capture", "run"])
def test_a_call_that_races_the_end_is_one_error_and_does_not_hang(kind: str, folders: Path) -> None:
    model = load_model(save("llama", folders), "eager", dtype="float32").warmup()
    calls: dict[str, Callable[[], Any]] = {
        "stream": lambda: list(model.generate_stream(PROMPT, max_tokens=50, ignore_eos=True)),
        "batch": lambda: model.generate(UNEQUAL, max_tokens=50, ignore_eos=True),
        "capture": lambda: model.capture_generation(PROMPT, [POINT], max_tokens=50, ignore_eos=True),
        "run": lambda: model.run_with_cache(UNEQUAL, [POINT]),
    }
    begun = threading.Barrier(4)
    ends: list[str] = []

    def work(k: int) -> None:
        begun.wait(PATIENCE)
        if k == 3:
            time.sleep(0.05)
            model.shutdown()
            return
        with pytest.raises(BackendUnavailable, match="shut down") as caught:
            forever(calls[kind])
        ends.append(str(caught.value))

    on_threads(work, 4)
    assert len(ends) == 3
    model.shutdown()
    with pytest.raises(BackendUnavailable, match="shut down"):
        calls[kind]()


def test_the_first_calls_of_all_threads_load_the_weights_once(folders: Path) -> None:
    made = 0
    from interp_core.backend import make_backend
    from interp_core.session import Session

    with load_model(save("llama", folders), "eager", dtype="float32") as cold:

        def counting(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            return make_backend(*arguments)

        model = InterpModel(cold.profile, Session(cold.profile, make=counting))
        on_threads(lambda k: model.run_with_cache(PROMPT, [POINT]) and None, 6)
        assert made == 1
        model.shutdown()
