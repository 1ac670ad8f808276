"""Probabilities of attention, written: whatever kernel runs, heads, queries, batches and generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_families
import torch
import transformers as hf
from families import FAMILIES, save
from tiny_families import PROMPT, write

from interp_core import (
    Ablate,
    Add,
    Apply,
    CapabilityUnsupported,
    InterpModel,
    Replace,
    RequestError,
    capture_generation,
    generate,
    load_model,
    run_with_cache,
    steer,
)
from interp_core.checks import difference

OTHER = [8, 31, 200, 77, 3, 14]
_MODELS = [("llama", "sdpa"), ("llama", "eager"), ("gemma2", None), ("gpt2", "sdpa"), ("falcon-many_keys", "sdpa"),
           ("gpt_neo", "eager"), ("gpt_oss", "eager"), ("xglm", "eager")]  # fmt: skip


def _sinks() -> hf.GptOssConfig:
    """A column of sink logits beside the scores, and windows."""
    sizes = {k: v for k, v in tiny_families._WIDE.items() if k != "intermediate_size"}
    return hf.GptOssConfig(
        **sizes, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        layer_types=tiny_families._MIXED["layer_types"],
    )  # fmt: skip


@pytest.fixture(params=_MODELS, ids=lambda pair: "-".join(map(str, pair)))
def model(request: pytest.FixtureRequest, folders: Path) -> Iterator[InterpModel]:
    family, kernel = request.param
    folder = save(family, folders) if family in FAMILIES else write(_sinks, folders / f"sinks-{family}")
    with load_model(folder, "eager", dtype="float32", attn_implementation=kernel) as loaded:
        yield loaded


def mixed(model: InterpModel, probs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``[pos, heads, width]`` from ``[heads, query, key]`` and ``[pos, kv_heads, width]``."""
    group = model.n_heads // value.shape[1]
    return torch.einsum("hqk,khd->qhd", probs, value.repeat_interleave(group, dim=1))


def test_its_own_values_in_place_change_nothing(model: InterpModel) -> None:
    ends = ["z.1", "resid_post.3"]
    plain = run_with_cache(model, PROMPT, [*ends, "attn_probs.1"])
    same = run_with_cache(model, PROMPT, ends, steering=[Replace("attn_probs.1", plain["attn_probs.1"][0])])
    assert all(difference(same[end], plain[end]) < 2e-6 for end in ends)


def test_what_is_written_is_what_the_values_are_summed_by(model: InterpModel) -> None:
    probs = run_with_cache(model, PROMPT, ["attn_probs.1"])["attn_probs.1"][0]
    uniform = torch.ones_like(probs).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    for wanted, address, value in (
        (uniform, "attn_probs.1", uniform),
        (torch.cat([probs[:2], uniform[2:3], probs[3:]]), "attn_probs.1.head-2", uniform[2]),
    ):
        got = run_with_cache(model, PROMPT, ["attn_probs.1", "value.1", "z.1"], steering=[Replace(address, value)])
        assert difference(got["attn_probs.1"][0], wanted) < 2e-6
        assert difference(got["z.1"][0], mixed(model, wanted, got["value.1"][0])) < 1e-5
        assert difference(got["z.1"][0], mixed(model, probs, got["value.1"][0])) > 1e-3


def test_zeros_and_callables_at_some_queries_of_one_head(model: InterpModel) -> None:
    plain = run_with_cache(model, PROMPT, ["attn_probs.2", "z.2", "resid_post.3"])
    for operation, wanted in (
        (Ablate("attn_probs.2.head-1"), 0.0),
        (Apply("attn_probs.2.head-1", lambda rows: 0.5 * rows), 0.5),
    ):
        with steer(model, operation, positions=[4, 6]):
            got = run_with_cache(model, PROMPT, ["attn_probs.2", "z.2", "resid_post.3"])
        expected = plain["attn_probs.2"].clone()
        expected[:, 1, [4, 6]] *= wanted
        assert difference(got["attn_probs.2"], expected) < 2e-6
        z = plain["z.2"].clone()
        z[:, [4, 6], 1] *= wanted
        assert difference(got["z.2"], z) < 1e-5
        assert difference(got["resid_post.3"][:, :4], plain["resid_post.3"][:, :4]) < 1e-5
        assert difference(got["resid_post.3"][:, 4:], plain["resid_post.3"][:, 4:]) > 1e-4


def test_one_row_of_a_batch_leaves_the_others_alone(llama: InterpModel) -> None:
    from interp_core.requests import ForwardRequest, Read
    from interp_core.steering import as_steering, writes_for

    reads = tuple(Read(address=llama.address(a)) for a in ("attn_probs.1", "resid_post.3"))
    writes = writes_for([as_steering(llama.profile, Ablate("attn_probs.1"))], len(OTHER))
    steered = ForwardRequest(token_ids=tuple(OTHER), reads=reads, writes=writes)
    plain = ForwardRequest(token_ids=tuple(PROMPT), reads=reads)
    first, second = llama.session.run([plain, steered])
    alone = run_with_cache(llama, PROMPT, [r.address for r in reads])
    for read in reads:
        assert difference(first.rows[read.address], alone[read.address][0]) < 2e-6
    assert not second.rows[reads[0].address].any()
    # A callable sees the prompt's own queries and keys, not the padding of its company.
    seen = []

    def look(rows: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(rows.shape))
        return rows

    run_with_cache(llama, [PROMPT, OTHER], ["resid_post.3"], steering=[Apply("attn_probs.1", look)])
    assert sorted(seen) == [(6, 4, 6), (10, 4, 10)]


def test_generation_is_written_query_by_query(llama: InterpModel) -> None:
    with steer(llama, Ablate("attn_probs.1.head-0"), prompt=False):
        _, cache = capture_generation(llama, OTHER, ["attn_probs.1", "z.1"], max_tokens=4, ignore_eos=True)
    assert not cache["z.1"][0, 6:, 0].any()
    assert cache["z.1"][0, :6, 0].any()
    assert cache["attn_probs.1"][0, 1, 6:].any()
    assert generate(llama, OTHER, max_tokens=2, ignore_eos=True).token_ids


def test_what_has_no_meaning_is_refused_before_a_forward(llama: InterpModel) -> None:
    ones = torch.ones(10, 10)
    for match, operation in {
        "vectors have no meaning": Add("attn_probs.1", torch.ones(4)),
        r"takes \[4, queries, keys\]": Replace("attn_probs.1", ones),
        r"takes \[queries, keys\]": Replace("attn_probs.1.head-0", torch.ones(4, 10, 10)),
        "not finite": Replace("attn_probs.1.head-0", ones * float("nan")),
        "7 rows for 10": Replace("attn_probs.1.head-0", torch.ones(7, 10)),
        "with 7 keys, where there are 10": Replace("attn_probs.1.head-0", torch.ones(10, 7)),
    }.items():
        with pytest.raises(RequestError, match=match):
            run_with_cache(llama, PROMPT, ["resid_post.1"], steering=[operation])
    with pytest.raises(CapabilityUnsupported):
        run_with_cache(llama, PROMPT, ["resid_post.1"], steering=[Ablate("attn_scores.1")])
