"""Requests beside others, on real engines: cancels, forgeries, failures, steering of each its own, exact writes.

Every comparison is with the eager backend on the same checkpoint, and has a control that must differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from trap_tools import (
    CLOSE,
    D_MODEL,
    EMPTY,
    FAR,
    LAST,
    LISTED,
    ONE_ROW_LEFT,
    POINTS,
    TOGETHER,
    assert_settled,
    captured,
    counted,
    driven,
    engine_of,
    generated,
    held,
    in_threads,
    plain_tokens,
    prompt,
    push,
    request,
    worst,
    writing,
)

from interp_core import (
    Add,
    AddressError,
    Cache,
    InterpModel,
    NormScaledAdd,
    Replace,
    RequestError,
    Scale,
    run_with_cache,
    steer,
)
from interp_core.address import parse_address
from interp_core.checks import difference
from interp_vllm.engine import Engine
from interp_vllm.loop import finished, submit
from interp_vllm.wire import encode_request

pytestmark = pytest.mark.vllm


# Cancels.


@pytest.fixture
def serves(chunked: InterpModel, eager: InterpModel) -> Iterator[None]:
    """After the test nothing is left in the worker, and the engine gives right answers."""
    yield
    # A thread whose caller has gone may still have to begin, and to notice.
    for thread in threading.enumerate():
        if thread.name.startswith("AnyIO"):
            thread.join(timeout=60)
    assert_settled(chunked)
    assert worst(captured(chunked, ONE_ROW_LEFT), captured(eager, ONE_ROW_LEFT)) < CLOSE


@pytest.mark.usefixtures("serves")
def test_a_run_closed_before_its_first_step(chunked: InterpModel) -> None:
    backend = chunked.session.backend()
    begun = time.monotonic()
    for _ in range(5):
        run = backend.generate(request(TOGETHER[2], reads=[LAST], writes=[writing(push())], new=50))
        run.close()
        assert held(chunked) == [EMPTY]
    assert time.monotonic() - begun < 10


@pytest.mark.usefixtures("serves")
def test_a_run_closed_in_its_prefill(chunked: InterpModel) -> None:
    backend = chunked.session.backend()
    run = backend.generate(request(TOGETHER[2], reads=LISTED, writes=[writing(push())], new=50))
    until = time.monotonic() + 10
    while held(chunked) == [EMPTY] and time.monotonic() < until:
        pass
    assert held(chunked) != [EMPTY]
    run.close()
    assert held(chunked) == [EMPTY]


@pytest.mark.usefixtures("serves")
def test_streams_closed_while_they_generate(chunked: InterpModel) -> None:
    with steer(chunked, push()):
        streams = [chunked.generate_stream(t, max_tokens=250 - len(t), ignore_eos=True) for t in TOGETHER]
    taken = [[next(stream).token_id for _ in range(k + 1)] for k, stream in enumerate(streams)]
    assert counted(chunked, "requests") == 4
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert held(chunked) == [EMPTY]
    for tokens, ids in zip(TOGETHER, taken, strict=True):
        with steer(chunked, push()):
            assert list(chunked.generate(tokens, max_tokens=len(ids), ignore_eos=True).token_ids) == ids


@pytest.mark.usefixtures("serves")
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_cancelled_tasks_leave_nothing(delay: float, chunked: InterpModel) -> None:
    tokens, options = TOGETHER[1], {"max_tokens": 180, "ignore_eos": True}

    async def stream() -> None:
        async for _ in chunked.aio.generate_stream(tokens, **options):
            await asyncio.sleep(0)

    async def cancelled(work: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, delay)

    async def work() -> None:
        with steer(chunked, push()):
            await cancelled(chunked.aio.capture_generation(tokens, [LAST], **options))
            await cancelled(chunked.aio.generate([tokens, tokens[:9]], **options))
            await cancelled(stream())
            capturing: asyncio.Future[Any] = asyncio.ensure_future(chunked.aio.run_with_cache(TOGETHER, POINTS))
            await asyncio.sleep(delay / 4)
            capturing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await capturing

    asyncio.run(work())


# Refusals, forgeries, failures.


def test_what_does_not_fit_never_reaches_the_worker(sharing: InterpModel, eager: InterpModel) -> None:
    wide = torch.ones(D_MODEL + 1)
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (RequestError, lambda: captured(sharing, TOGETHER[0], [LAST], Add(LAST, wide))),
        (RequestError, lambda: captured(sharing, TOGETHER[0], [LAST], Replace(LAST, torch.ones(3, D_MODEL)))),
        (AddressError, lambda: captured(sharing, TOGETHER[0], [LAST], push(1, "resid_post.4"))),
        (AddressError, lambda: captured(sharing, TOGETHER[0], [LAST], push(1, "resid_most.1"))),
        (AddressError, lambda: captured(sharing, TOGETHER[0], ["resid_post.4"])),
        (AddressError, lambda: captured(sharing, TOGETHER[0], ["resid_most.1"])),
        (AddressError, lambda: captured(sharing, TOGETHER[0], ["z.1.head-4"])),
        (RequestError, lambda: captured(sharing, [*TOGETHER[0], 300], [LAST])),
        (RequestError, lambda: captured(sharing, prompt(256, 1), [LAST])),
        (RequestError, lambda: sharing.generate(prompt(250, 1), max_tokens=7)),
    ]
    before = counted(sharing, "steps")
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert counted(sharing, "steps") == before
    assert held(sharing) == [EMPTY]
    assert worst(captured(sharing, TOGETHER), captured(eager, TOGETHER)) < CLOSE


async def forged(engine: Engine, data: object, tokens: Sequence[int]) -> list[int]:
    """What vLLM makes of a request that this project did not encode."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False, extra_args={"interp": data}
    )
    outputs = engine._llm.generate({"prompt_token_ids": list(tokens)}, params, request_id=engine.name())
    *_, final = [output async for output in outputs]
    return list(final.outputs[0].token_ids)


def test_an_address_that_is_not_there_disturbs_nobody(sharing: InterpModel, eager: InterpModel) -> None:
    engine = engine_of(sharing)
    for point in ("resid_post.77", "attn_probs.4", "z.1.head-9", "path.no.such"):
        name = engine.name()
        data = encode_request(name, request(TOGETHER[0], reads=[point], new=6))
        others = submit(driven(engine, request(TOGETHER[1], reads=LISTED, writes=[writing(push())], new=6)))
        assert finished(submit(forged(engine, data, TOGETHER[0]))) == list(plain_tokens(eager, TOGETHER[0]))
        ids, rows = generated(eager, TOGETHER[1], 6, LISTED, push())
        found = finished(others)
        assert found[0] == list(ids[0])
        for address, got in found[2].rows.items():
            assert difference(got, rows[address][0]) < CLOSE
        with pytest.raises(RequestError, match=r"AddressError|CapabilityUnsupported"):
            finished(submit(engine.collect([(name, request(TOGETHER[0], reads=[point]))])))
    assert held(sharing) == [EMPTY]


@pytest.mark.parametrize("data", [b"rubbish", b"", b"\x94\xa1a\x05\x90", "text", ["a"], 5])
def test_bytes_that_are_no_request_disturb_nobody(data: object, sharing: InterpModel, eager: InterpModel) -> None:
    engine = engine_of(sharing)
    others = submit(driven(engine, request(TOGETHER[1], reads=LISTED, writes=[writing(push())], new=6)))
    assert finished(submit(forged(engine, data, TOGETHER[0]))) == list(plain_tokens(eager, TOGETHER[0]))
    ids, rows = generated(eager, TOGETHER[1], 6, LISTED, push())
    found = finished(others)
    assert found[0] == list(ids[0])
    for address, got in found[2].rows.items():
        assert difference(got, rows[address][0]) < CLOSE
    # Nobody can ask for what has no name: the next step forgets it.
    assert worst(captured(sharing, ONE_ROW_LEFT), captured(eager, ONE_ROW_LEFT)) < CLOSE
    assert held(sharing) == [EMPTY]


def test_an_operation_that_fails_fails_for_its_own_request_alone(sharing: InterpModel, eager: InterpModel) -> None:
    engine = engine_of(sharing)
    broken = writing(Replace(parse_address("resid_post.1"), torch.ones(3, D_MODEL)))
    bad = request(TOGETHER[0], reads=[LAST], writes=[broken], new=20)
    good = request(TOGETHER[1], reads=LISTED, new=20)

    async def together() -> list[Any]:
        works = [driven(engine, one) for one in (bad, good, bad)]
        return await asyncio.gather(*works, return_exceptions=True)

    before = counted(sharing, "steps")
    first, (ids, _, result), last = finished(submit(together()))
    assert counted(sharing, "steps") - before < 2 * 20
    for failure in (first, last):
        assert isinstance(failure, RequestError)
        assert "inside the forward" in str(failure)
    expected, rows = generated(eager, TOGETHER[1], 20, LISTED)
    assert ids == list(expected[0])
    for address, got in result.rows.items():
        assert difference(got, rows[address][0]) < CLOSE
    with pytest.raises(RequestError, match="inside the forward"):
        sharing.session.run([evolve(bad, sampling=None)])
    with pytest.raises(RequestError, match="inside the forward"):
        list(sharing.session.generate(bad))
    assert_settled(sharing)


# In company.


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_each_of_several_is_steered_its_own_way(how: str, sharing: InterpModel, eager: InterpModel) -> None:
    tokens, points = TOGETHER[1], ["resid_post.*", "z.2", "lm_head"]
    alone = generated(sharing, tokens, 12, points)
    steps = counted(sharing, "steps")
    found: dict[int, tuple[list[tuple[int, ...]], Cache]] = {}

    def pushes(k: int) -> Any:
        return steer(sharing, push(k)) if k else contextlib.nullcontext()

    def in_thread(k: int) -> None:
        with pushes(k):
            found[k] = generated(sharing, tokens, 12, points)

    async def in_task(k: int) -> None:
        with pushes(k):
            completion, cache = await sharing.aio.capture_generation(tokens, points, max_tokens=12, ignore_eos=True)
        found[k] = [completion.token_ids], cache

    async def in_tasks() -> None:
        await asyncio.gather(*(in_task(k) for k in range(5)))

    if how == "threads":
        in_threads([functools.partial(in_thread, k) for k in range(5)])
    else:
        asyncio.run(in_tasks())
    assert counted(sharing, "steps") - steps < 5 * 12
    for k in range(5):
        ids, rows = generated(eager, tokens, 12, points, *([push(k)] if k else []))
        assert found[k][0] == ids
        assert worst(found[k][1], rows) < CLOSE
        assert all(worst(found[other][1], rows) > FAR for other in range(5) if other != k)
    assert found[0][0] == alone[0]
    assert worst(found[0][1], alone[1]) < 1e-6
    assert held(sharing) == [EMPTY]


# The numbers of a step, and who owns them.


@pytest.mark.parametrize("point", ["resid_post.1", "resid_pre.2", "resid_pre.0", "resid_mid.1"])
def test_a_step_in_proportion_is_one_of_the_whole_stream(point: str, sharing: InterpModel, eager: InterpModel) -> None:
    vector, points = torch.linspace(-1, 2, D_MODEL), [point, "resid_post.*"]
    operation = NormScaledAdd(point, vector, 0.7)
    plain = captured(sharing, TOGETHER, points)
    got, want = (captured(model, TOGETHER, points, operation) for model in (sharing, eager))
    assert worst(got, want) < CLOSE
    assert worst(plain, want) > FAR
    before, after = (cache[point][2] for cache in (plain, got))
    step = 0.7 * before.norm(dim=-1, keepdim=True) * (vector / vector.norm())
    assert difference(after - before, step) < CLOSE


def test_what_is_done_to_a_result_stays_there(sharing: InterpModel) -> None:
    points = ["resid_post.1", "resid_pre.2", "attn_probs.1"]
    first = captured(sharing, [TOGETHER[1]], points)
    kept = {address: first[address].clone() for address in first}
    first["resid_post.1"].zero_()
    first["attn_probs.1"].fill_(-1.0)
    assert torch.equal(first["resid_pre.2"], kept[parse_address("resid_pre.2")])
    second = captured(sharing, [TOGETHER[1]], points)
    assert not torch.equal(first["resid_post.1"], kept[parse_address("resid_post.1")])
    for address, rows in kept.items():
        assert torch.equal(second[address], rows)


def test_a_run_ended_just_before_its_last_step_gives_its_rows(sharing: InterpModel) -> None:
    backend = sharing.session.backend()
    wanted = request(TOGETHER[0], reads=[LAST], new=3)
    for i in range(60):
        run = backend.generate(wanted)
        next(run), next(run)
        time.sleep(i * 0.0002)
        assert run.result().rows[parse_address(LAST)].shape == (len(TOGETHER[0]) + 1, D_MODEL)
        run.close()
    assert_settled(sharing)


def test_sampling_that_vllm_refuses_is_an_error_of_ours(sharing: InterpModel) -> None:
    with pytest.raises(RequestError, match="temperature"):
        sharing.generate(TOGETHER[0], max_tokens=2, temperature=3.0)


@pytest.mark.parametrize("point", ["resid_pre", "resid_mid", "resid_post"])
def test_rows_put_into_the_stream_are_there_exactly(point: str, sharing: InterpModel) -> None:
    """What is left of rounding would be scaled up by the next norm, and by much more in half precision."""
    rows = torch.randn(len(TOGETHER[0]), D_MODEL, generator=torch.Generator().manual_seed(3)) * 0.01
    address = f"{point}.2"
    for operation, wanted in ((Replace(address, rows), rows), (Scale(address, torch.ones(D_MODEL), 1.0), None)):
        got = run_with_cache(sharing, TOGETHER[0], [address, LAST], steering=[operation])
        plain = run_with_cache(sharing, TOGETHER[0], [address, LAST])
        assert torch.equal(got[address][0], plain[address][0] if wanted is None else wanted)
        assert torch.equal(got[LAST], plain[LAST]) is (wanted is None)


def test_positions_that_select_nothing_give_no_rows(sharing: InterpModel, eager: InterpModel) -> None:
    for positions in ([], slice(20, 20)):
        for point in ("resid_post.2", "lm_head", "attn_probs.1", "z.1.head-2"):
            got, want = (run_with_cache(m, TOGETHER[0], [point], positions=positions)[point] for m in (sharing, eager))
            assert got.shape == want.shape, point


def test_a_read_of_the_raw_output_does_not_show_what_was_written_behind_it(
    sharing: InterpModel, eager: InterpModel
) -> None:
    for read, written in (
        ("attn_out.2", "attn_out_post.2"),
        ("attn_out_post.2", "attn_out.2"),
        ("mlp_out.2", "mlp_out_post.2"),
    ):
        results = [
            run_with_cache(m, TOGETHER[0], [read], steering=[push(2.0, written)])[read] for m in (sharing, eager)
        ]
        assert difference(*results) < CLOSE, (read, written)
