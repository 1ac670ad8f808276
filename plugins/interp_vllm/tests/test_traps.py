"""Traps of vLLM's scheduler, on real engines: chunks of a prompt, shared prefixes, preemption.

Every comparison is with the eager backend on the same checkpoint, and has a control that must differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trap_tools import (
    BLOCK,
    CLOSE,
    D_MODEL,
    EMPTY,
    FAR,
    LAST,
    ONE_ROW_LEFT,
    POINTS,
    TOGETHER,
    captured,
    counted,
    driven,
    engine_of,
    generated,
    held,
    in_threads,
    prompt,
    push,
    request,
    worst,
    writing,
)

from interp_core import (
    Cache,
    InterpModel,
    NormScaledAdd,
    Replace,
    Scale,
    run_with_cache,
)
from interp_core.address import parse_address
from interp_core.checks import difference
from interp_vllm.loop import finished, submit

pytestmark = pytest.mark.vllm


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
