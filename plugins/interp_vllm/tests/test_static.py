"""Declared taps in a compiled forward, on real compiled engines, against Python forwards and eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_families import PROMPTS, Loader

from interp_core import (
    Ablate,
    Add,
    BackendUnavailable,
    Cap,
    CapabilityUnsupported,
    InterpModel,
    NormScaledAdd,
    Replace,
    RequestError,
    Scale,
    Swap,
    inspect_model,
    load_model,
    run_with_cache,
)
from interp_core.checks import difference
from interp_vllm.static import buffer_bytes, step_tokens

pytestmark = pytest.mark.vllm

TIGHT = 1e-5
LONG = [[3 + (7 * i * i + 11 * k) % 290 for i in range(n)] for k, n in enumerate((20, 70, 150, 65))]
READS = (
    "embeddings resid_pre.* attn_in.1 value.* z.* attn_out.* attn_out_post.* resid_mid.* mlp_in.2 mlp_pre.* mlp_act.*"
)
READS = f"{READS} mlp_out.* mlp_out_post.* resid_post.* final_norm".split()  # type: ignore[assignment]
WRITES = ["embeddings", "resid_pre.1", "z.1", "mlp_act.2", "resid_post.*", "final_norm"]
Trio = tuple[InterpModel, InterpModel, InterpModel]


@pytest.fixture(scope="module")
def code_generator() -> None:
    """What the compiler can do, found out once: each engine, a fork of this process, is half a minute quicker."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    assert valid_vec_isa_list()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2", "olmo2"])
def trio(request: pytest.FixtureRequest, loaded: Loader, code_generator: None) -> Iterator[Trio]:
    """A family compiled, hooked and on eager; the compiled one in steps of 64 tokens."""
    family = request.param
    extra = ["q_norm_in.*", "q_norm_out.*", "k_norm_out.1"] if family in ("qwen3", "olmo2") else []
    taps: dict[str, Any] = {"static_points": [*READS, *extra], "static_writes": WRITES}
    models = (
        loaded(family, "vllm-static", max_model_len=256, max_num_batched_tokens=64, **taps),
        loaded(family, max_num_batched_tokens=64),
        loaded(family, "eager"),
    )
    for model in models:
        model.warmup()
    yield models
    for model in models:
        model.shutdown()


def test_rows_of_the_graph_are_rows_of_python_forwards(trio: Trio) -> None:
    static, hooked, eager = trio
    for prompts in (PROMPTS, LONG):
        found, wanted = (run_with_cache(m, prompts, list(static.static_points)) for m in (static, hooked))
        far = {str(a): difference(found[a], wanted[a]) for a in static.static_points}
        assert max(far.values()) < TIGHT, {a: d for a, d in far.items() if d >= TIGHT}
    reference = run_with_cache(eager, LONG, ["resid_post.2", "z.1.head-3"], positions="last")
    own = run_with_cache(static, LONG, ["resid_post.2", "z.1.head-3"], positions="last")
    assert all(difference(own[a], reference[a]) < TIGHT for a in reference)
    assert (
        difference(own["resid_post.2"], run_with_cache(eager, LONG, ["resid_post.1"], positions="last")["resid_post.1"])
        > 0.1
    )


def operations(model: InterpModel, address: str) -> list[Any]:
    shape = torch.Size(model.profile.shape(model.address(address)))
    v = torch.sin(0.5 + torch.arange(shape.numel()) * 0.9).reshape(shape)
    w = torch.cos(torch.arange(shape.numel()) * 0.37).reshape(shape)
    return [
        Add(address, v, scale=3.0),
        Scale(address, v, factor=-1.5),
        Cap(address, v, low=-0.1, high=0.2),
        NormScaledAdd(address, v, scale=0.8),
        Ablate(address),
        Ablate(address, v),
        Replace(address, 2.0 * v),
        *([Swap(address, v, w)] if shape.numel() > 1 else []),
    ]


SITES = ("embeddings", "resid_pre.1", "z.1", "z.1.head-2", "mlp_act.2", "mlp_act.2.neuron-5", "resid_post.1")


def test_every_operation_at_every_site_does_what_it_does_on_eager(trio: Trio) -> None:
    """All operations on one family; on the others, whose arithmetic is the same, two."""
    static, _, eager = trio
    ends = [f"resid_post.{static.n_layers - 1}", "final_norm"]
    plain = run_with_cache(static, LONG[1], ends)
    for address in SITES:
        listed = operations(static, address)
        for operation in listed if static.facts.model_type == "llama" else listed[:2]:
            results = []
            for model in (static, eager):
                with model.steer(operation, positions=[3, 66]):
                    results.append(run_with_cache(model, LONG[1], ends))
            label = (address, type(operation).__name__)
            assert all(difference(results[0][e], results[1][e]) < 1e-4 for e in ends), label
            assert torch.equal(results[0][ends[0]][0, :3], plain[ends[0]][0, :3]), label
    for address in ("embeddings", "resid_pre.1", "resid_post.1"):
        found, wanted = (run_with_cache(m, LONG[1], ends, steering=[Ablate(address)]) for m in (static, eager))
        assert all(difference(found[e], wanted[e]) < 1e-4 for e in ends), address
        assert difference(found[ends[1]], plain[ends[1]]) > 1e-2, address


def test_prompt_generated_rows_and_company(trio: Trio) -> None:
    static, _, eager = trio
    v = torch.sin(torch.arange(static.d_model) * 0.9)
    rows = torch.randn(len(LONG[1]), static.d_model, generator=torch.Generator().manual_seed(0))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Add("resid_post.1", v, scale=4.0), {"prompt": False}),
        (Add("resid_post.1", v, scale=4.0), {"generated": False}),
        ([Add("resid_post.1", v), Scale("resid_post.1", v, 0.2), Add("resid_post.2", v, scale=-2.0)], {}),
        (Replace("resid_post.1", rows), {}),
        (Replace("resid_post.1", rows[:3]), {"positions": [64, 2, 63]}),
    ]
    for operation, where in cases:
        results = []
        for model in (static, eager):
            with model.steer(operation, **where):
                results.append(model.capture_generation(LONG[1], ["resid_post.3"], max_tokens=5, ignore_eos=True))
        (mine, found), (theirs, wanted) = results
        assert mine.token_ids == theirs.token_ids, where
        assert difference(found["resid_post.3"], wanted["resid_post.3"]) < 1e-4, where
    before = static.generate(LONG, max_tokens=5)
    streams = [
        static.generate_stream(LONG[1], max_tokens=30, steering=[Add("resid_post.1", v, scale=9.0)], ignore_eos=True)
    ]
    next(streams[0])
    assert [c.token_ids for c in static.generate(LONG, max_tokens=5)] == [c.token_ids for c in before]
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    backend: Any = static.session.backend()
    summary = backend.engine.wait(backend.engine.summary())[0]
    assert {k: summary[k] for k in ("requests", "sites", "bytes")} == {"requests": 0, "sites": 0, "bytes": 0}


def test_what_was_not_declared_is_refused_with_the_call_that_would_serve_it(trio: Trio) -> None:
    static, _, _ = trio
    for address, words in (("mlp_in.1", "static_points"), ("attn_probs.1", "compiled"), ("lm_head", "compiled")):
        with pytest.raises(CapabilityUnsupported, match=words):
            run_with_cache(static, PROMPTS[0], [address])
    with pytest.raises(CapabilityUnsupported, match="static_writes"):
        run_with_cache(
            static,
            PROMPTS[0],
            ["resid_post.1"],
            steering=[Add("z.2", torch.ones(static.profile.shape(static.address("z.2"))))],
        )
    v = torch.ones(static.d_model)
    with pytest.raises(RequestError, match="more than 4 operations"):
        run_with_cache(static, PROMPTS[0], ["resid_post.1"], steering=[Add("resid_post.1", v)] * 5)
    with pytest.raises(RequestError, match="do not fit"):
        run_with_cache(
            static, [5] * 200, ["resid_post.1"], steering=[Replace("resid_post.1", torch.ones(200, static.d_model))] * 3
        )
    assert static.generate(PROMPTS[0], max_tokens=2).token_ids


def test_the_declaration_answers_before_anything_loads(loaded: Loader) -> None:
    folder = loaded("mistral", "eager").model_id
    profile = inspect_model(folder, "vllm-static", max_model_len=64)
    assert [str(a) for a in profile.static_points] == [f"resid_post.{i}" for i in range(4)]
    assert profile.static_writes == profile.static_points
    assert step_tokens(profile.options) == 2048
    described = profile.describe()["static_bytes"]
    assert described == buffer_bytes(profile, 2048) > 4 * 2048 * 96 * 4
    with pytest.raises(RequestError, match="declare nothing"):
        inspect_model(folder, "vllm-static", static_points=[])
    huge = load_model(folder, "vllm-static", max_num_batched_tokens=2**31)
    with pytest.raises(BackendUnavailable, match=r"GiB are free"):
        huge.warmup()


@pytest.mark.parametrize(
    ("extension", "words"), [("SwappedTaps", "resid_post.1"), ("SwappedWrites", "writing resid_post")]
)
def test_a_sabotaged_site_is_not_served_and_named(
    extension: str, words: str, loaded: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interp_vllm.backend import VllmBackend

    # The graph without the code generator: what is sabotaged is in it all the same, and it starts sooner.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    model = loaded("mistral", "vllm-static", max_model_len=64)
    backend = VllmBackend(model.profile, model.profile.options)
    backend.engine.arguments["worker_extension_cls"] = f"sabotage.{extension}"
    model.session.make = lambda *_: backend
    with pytest.raises(BackendUnavailable, match=words):
        model.warmup()


def test_two_engines_with_other_taps_one_after_the_other(loaded: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    eager = loaded("mistral", "eager")
    for points in (["resid_post.0"], ["z.2", "mlp_out.1"]):
        with loaded("mistral", "vllm-static", max_model_len=64, static_points=points) as model:
            found, wanted = (run_with_cache(m, PROMPTS[0], points) for m in (model, eager))
            assert all(difference(found[a], wanted[a]) < TIGHT for a in found)


def test_plain_vllm_generates_and_refuses_the_rest_before_it_loads(
    loaded: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    model, eager = loaded("mistral", "vllm-generate", max_model_len=128), loaded("mistral", "eager")
    assert not model.hooks_available
    for refused in (
        lambda: run_with_cache(model, PROMPTS[0], ["resid_post.1"]),
        lambda: model.generate(PROMPTS[0], max_tokens=2, steering=[Add("resid_post.1", torch.ones(96))]),
        lambda: model.logit_lens(PROMPTS[0]),
        lambda: model.capture_attention(PROMPTS[0], [1]),
    ):
        with pytest.raises(CapabilityUnsupported):
            refused()
    assert not model.session.warm
    found, wanted = (m.generate(PROMPTS, max_tokens=5, n_logprobs=2) for m in (model, eager))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert max(abs(a[0].logprob - b[0].logprob) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < 1e-4
    assert [s.token_id for s in model.generate_stream(PROMPTS[0], max_tokens=5)] == list(wanted[0].token_ids)
