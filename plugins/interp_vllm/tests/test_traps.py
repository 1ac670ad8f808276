"""Traps of vLLM's scheduler, on real engines: chunks, shared prefixes, preemption, cancels, forgeries, company.

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
from interp_core.identities import difference
from interp_core.requests import ForwardRequest, ForwardResult, Read, Sampling, Where, Write
from interp_vllm.engine import Engine
from interp_vllm.loop import finished, submit
from interp_vllm.wire import encode_request

pytestmark = pytest.mark.vllm

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


def assert_settled(model: InterpModel, seconds: float = 5.0) -> None:
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


@pytest.fixture(scope="module")
def eager(loaded: Callable[..., InterpModel]) -> InterpModel:
    """The same model on eager. Its tokens vary from step to step, unlike those of the tiny Llama."""
    return loaded("mistral", "eager").warmup()


@pytest.fixture(scope="module")
def chunked(loaded: Callable[..., InterpModel]) -> InterpModel:
    """At most 32 rows in a step."""
    return loaded("mistral", max_num_batched_tokens=32, max_num_seqs=8, block_size=BLOCK).warmup()


def test_chunks_give_every_row_once_and_in_order(chunked: InterpModel, eager: InterpModel) -> None:
    before = counted(chunked, "steps")
    got, want = captured(chunked, TOGETHER), captured(eager, TOGETHER)
    assert counted(chunked, "steps") - before >= sum(map(len, TOGETHER)) / 32
    assert worst(got, want) < CLOSE
    shifted = want["resid_post.0"].roll(1, dims=1)
    assert difference(got["resid_post.0"], shifted) > FAR
    assert held(chunked) == [EMPTY]


def test_a_last_chunk_of_one_row(chunked: InterpModel, eager: InterpModel) -> None:
    before = counted(chunked, "steps")
    assert worst(captured(chunked, ONE_ROW_LEFT), captured(eager, ONE_ROW_LEFT)) < CLOSE
    assert counted(chunked, "steps") - before == 2
    kept = run_with_cache(chunked, ONE_ROW_LEFT, POINTS[:4], positions=[32, 0, 31])
    assert worst(kept, run_with_cache(eager, ONE_ROW_LEFT, POINTS[:4], positions=[32, 0, 31])) < CLOSE


STEERED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "everywhere": ([push()], {}),
    "positions": ([push()], {"positions": [0, 3, 19, 31, 32, 40]}),
    "the last position": ([push()], {"positions": "last"}),
    "positions that are generated": ([push()], {"positions": [22, 34, 72, 201]}),
    "the prompt": ([push()], {"generated": False}),
    "what is generated": ([push()], {"prompt": False}),
    "in proportion to the norm": ([NormScaledAdd("resid_pre.1", torch.linspace(-1, 2, D_MODEL), 0.7)], {}),
    "several points": ([push(2, "resid_mid.0"), Scale("attn_out.2", torch.ones(D_MODEL), 4.0)], {"positions": [32]}),
    "replaced by one row": ([Replace("resid_post.1", torch.linspace(-1, 1, D_MODEL))], {"positions": [1, 31, 32, 36]}),
}
GENERATED_ONLY = ("positions that are generated", "what is generated")


@pytest.mark.parametrize("case", STEERED)
def test_steering_under_chunks(case: str, chunked: InterpModel, eager: InterpModel) -> None:
    operations, where = STEERED[case]
    for prompts in (TOGETHER, ONE_ROW_LEFT):
        if case not in GENERATED_ONLY:
            want = captured(eager, prompts, POINTS, *operations, **where)
            assert worst(captured(chunked, prompts, POINTS, *operations, **where), want) < CLOSE
            assert worst(captured(chunked, prompts), want) > FAR
        ids, rows = generated(chunked, prompts, 6, POINTS, *operations, **where)
        expected, want = generated(eager, prompts, 6, POINTS, *operations, **where)
        assert ids == expected
        assert worst(rows, want) < CLOSE
        assert worst(rows, generated(eager, prompts, 6, POINTS)[1]) > FAR


@pytest.mark.parametrize("positions", [None, [69, 0, 31, 5, 32, 33]])
def test_replaced_rows_under_chunks(positions: list[int] | None, chunked: InterpModel, eager: InterpModel) -> None:
    prompts = [prompt(70, 6), prompt(70, 7)]
    count = 70 if positions is None else len(positions)
    rows = torch.randn(count, D_MODEL, generator=torch.Generator().manual_seed(8))
    operation = Replace("resid_post.1", rows)
    want = captured(eager, prompts, POINTS, operation, positions=positions)
    got = captured(chunked, prompts, POINTS, operation, positions=positions)
    assert worst(got, want) < CLOSE
    assert difference(got["resid_post.1"][1][slice(None) if positions is None else positions], rows) < CLOSE
    assert worst(captured(chunked, prompts), want) > FAR
    ids, new = generated(chunked, prompts, 6, POINTS, operation, positions=positions)
    expected, want = generated(eager, prompts, 6, POINTS, operation, positions=positions)
    assert ids == expected
    assert worst(new, want) < CLOSE


# Prefixes that plain requests share.


@pytest.fixture(scope="module")
def sharing(loaded: Callable[..., InterpModel]) -> InterpModel:
    """With a prefix cache."""
    return loaded("mistral", enable_prefix_caching=True, block_size=BLOCK).warmup()


def test_plain_requests_share_and_one_that_reads_computes_all(sharing: InterpModel, eager: InterpModel) -> None:
    engine, tokens = engine_of(sharing), prompt(70, 20)
    assert finished(submit(driven(engine, request(tokens))))[1] == 0
    assert finished(submit(driven(engine, request(tokens))))[1] == 2 * BLOCK
    _, cached, result = finished(submit(driven(engine, request(tokens, reads=["resid_post.2"]))))
    assert cached == 0
    want = captured(eager, tokens, ["resid_post.2"])["resid_post.2"][0]
    assert difference(result.rows[parse_address("resid_post.2")], want) < CLOSE
    assert worst(captured(sharing, [tokens]), captured(eager, [tokens])) < CLOSE
    assert finished(submit(driven(engine, request(tokens))))[1] == 2 * BLOCK


@pytest.mark.parametrize("steered_first", [True, False])
def test_steered_and_plain_requests_share_nothing(
    steered_first: bool, sharing: InterpModel, eager: InterpModel
) -> None:
    engine, tokens = engine_of(sharing), prompt(70, 30 + steered_first)
    plain = list(generated(eager, tokens, 6, [LAST])[0][0])
    moved = list(generated(eager, tokens, 6, [LAST], push())[0][0])
    assert plain != moved
    steered = request(tokens, writes=[writing(push())], new=6)

    def run_plain(cached: int) -> None:
        found = finished(submit(driven(engine, request(tokens, new=6))))
        assert found[:2] == (plain, cached)

    def run_steered() -> None:
        found = finished(submit(driven(engine, steered)))
        assert found[:2] == (moved, 0)

    if not steered_first:
        run_plain(0)
    run_steered()
    run_plain(0 if steered_first else 2 * BLOCK)
    run_steered()
    run_steered()
    run_plain(2 * BLOCK)
    assert worst(captured(sharing, [tokens]), captured(eager, [tokens])) < CLOSE
    assert held(sharing) == [EMPTY]


# Preemption.


def test_preempted_requests_begin_again_and_lose_nothing(
    loaded: Callable[..., InterpModel], eager: InterpModel
) -> None:
    prompts = [prompt(n, 40 + n) for n in (40, 44, 48, 52, 56, 60)]
    tight: Any = {"num_gpu_blocks_override": 14, "block_size": BLOCK, "max_model_len": 128}
    found: dict[int, tuple[list[tuple[int, ...]], Cache]] = {}
    with loaded("mistral", **tight).warmup() as model:

        def work(k: int) -> None:
            operations = [push()] if k == 2 else []
            found[k] = generated(model, [prompts[k]], 60, ["resid_post.*", "z.1", "attn_probs.2"], *operations)

        in_threads([functools.partial(work, k) for k in range(len(prompts))])
        assert counted(model, "restarts") > 0
        assert held(model) == [EMPTY]
    for k, tokens in enumerate(prompts):
        operations = [push()] if k == 2 else []
        ids, rows = generated(eager, [tokens], 60, ["resid_post.*", "z.1", "attn_probs.2"], *operations)
        assert found[k][0] == ids
        assert worst(found[k][1], rows) < CLOSE
    assert generated(eager, [prompts[2]], 60, [LAST])[0] != found[2][0]


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


# Cancels.


@pytest.fixture
def serves(chunked: InterpModel, eager: InterpModel) -> Iterator[None]:
    """After the test nothing is left in the worker, and the engine gives right answers."""
    yield
    # A thread whose caller has gone may still have to begin, and to notice.
    for thread in threading.enumerate():
        if thread.name.startswith("AnyIO"):
            thread.join(timeout=10)
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


def plain_tokens(model: InterpModel, tokens: Sequence[int]) -> tuple[int, ...]:
    found: tuple[int, ...] = model.generate(tokens, max_tokens=6, ignore_eos=True).token_ids
    return found


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
