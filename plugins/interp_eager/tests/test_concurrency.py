"""Threads and tasks: no caller sees another's rows or steering; the awaitable twin gives the same answers."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import anyio
import torch
from tiny_families import PROMPT

from interp_core import Add, InterpModel, RequestError, run_with_cache, steer
from interp_core.aio import AioModel


def test_threads_do_not_steer_each_other(llama: InterpModel) -> None:
    want = {
        k: run_with_cache(llama, PROMPT, ["resid_post.3"], steering=push(llama, k))["resid_post.3"] for k in range(4)
    }
    got: dict[int, list[torch.Tensor]] = {k: [] for k in range(4)}

    def work(k: int) -> None:
        with steer(llama, push(llama, k)):
            for _ in range(8):
                got[k].append(run_with_cache(llama, PROMPT, ["resid_post.3"])["resid_post.3"])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.equal(want[0], want[1])
    for k in range(4):
        assert len(got[k]) == 8
        assert all(torch.equal(rows, want[k]) for rows in got[k])


def push(model: InterpModel, k: int) -> Add:
    return Add("resid_post.1", torch.linspace(-1, 1, model.d_model), scale=float(k))


def test_a_stream_may_be_interleaved_with_other_calls(llama: InterpModel) -> None:
    want = llama.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids
    found = []
    for step in llama.generate_stream(PROMPT, max_tokens=5, ignore_eos=True):
        found.append(step.token_id)
        run_with_cache(llama, PROMPT[:3], ["resid_post.1"], steering=push(llama, 3))
    assert tuple(found) == want


def test_the_awaitable_twin_gives_the_same(llama: InterpModel) -> None:
    async def work() -> tuple[Any, list[int]]:
        with steer(llama, push(llama, 2)):
            cache = await llama.aio.run_with_cache(PROMPT, ["resid_post.3"])
            ids = [s.token_id async for s in llama.aio.generate_stream(PROMPT, max_tokens=4, ignore_eos=True)]
        return cache, ids

    cache, ids = anyio.run(work)
    with steer(llama, push(llama, 2)):
        assert torch.equal(cache["resid_post.3"], run_with_cache(llama, PROMPT, ["resid_post.3"])["resid_post.3"])
        assert tuple(ids) == llama.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids
    assert inspect.signature(AioModel.generate) == inspect.signature(InterpModel.generate)


def test_a_seed_repeats_and_sampling_differs(llama: InterpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 2.0, "ignore_eos": True, "top_k": 50}
    once = llama.generate(PROMPT, seed=3, **options).token_ids
    assert llama.generate(PROMPT, seed=3, **options).token_ids == once
    assert llama.generate(PROMPT, seed=4, **options).token_ids != once


def test_gradients_reach_a_captured_point(folders: Any) -> None:
    from tiny_families import save

    from interp_core import load_model

    with load_model(save("llama", folders), backend="eager", dtype="float32", requires_grad=True) as model:
        cache = run_with_cache(model, PROMPT, ["resid_post.1", "lm_head"], detach=False)
        (grad,) = torch.autograd.grad(cache["lm_head"][0, -1, 7], cache["resid_post.1"])
        assert grad.shape == cache["resid_post.1"].shape
        assert float(grad.abs().sum()) > 0
        assert not run_with_cache(model, PROMPT, ["resid_post.1"])["resid_post.1"].requires_grad


def test_results_are_copies(llama: InterpModel) -> None:
    first = run_with_cache(llama, PROMPT, ["resid_post.1", "resid_pre.2"])
    first["resid_post.1"].zero_()
    assert bool(first["resid_pre.2"].any())
    assert torch.equal(run_with_cache(llama, PROMPT, ["resid_post.1"])["resid_post.1"], first["resid_pre.2"])


def test_an_unknown_module_path_is_one_error(llama: InterpModel) -> None:
    import pytest

    from interp_core import AddressError

    cache = run_with_cache(llama, PROMPT, ["path.model.layers.1.mlp", "mlp_out.1"])
    assert torch.equal(cache["path.model.layers.1.mlp"], cache["mlp_out.1"])
    with pytest.raises(AddressError, match="no_such"):
        run_with_cache(llama, PROMPT, ["path.model.no_such"])
    with pytest.raises(RequestError, match="one prompt"):
        llama.generate_stream([PROMPT, PROMPT], max_tokens=1)
