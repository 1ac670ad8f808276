"""Two ranks on a CPU, tensor and pipeline parallel: what one of them holds is whole in results, and written whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_families_vllm import apart, served
from vllm_families import PROMPTS, Loader

from interp_core import Add, InterpModel, Scale, run_with_cache

pytestmark = pytest.mark.vllm

TIGHT = 1e-5
ROUTER = {"router_logits", "expert_weights", "expert_indices"}


CASES = [
    *(("tensor", family, "vllm") for family in ("llama", "llama-one_key", "qwen3", "mixtral", "gpt2")),
    ("tensor", "olmo2", "transformers"),
    *(("pipeline", family, "vllm") for family in ("llama", "gemma2", "gpt2")),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, loaded: Loader) -> Iterator[tuple[InterpModel, InterpModel]]:
    """A family split over two ranks, and on eager."""
    how, family, impl = request.param
    with pytest.MonkeyPatch.context() as patch:
        # Two ranks on a machine with one memory node.
        patch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
        options = {"model_impl": impl, f"{how}_parallel_size": 2}
        model, eager = loaded(family, **options), loaded(family, "eager")
        yield model.warmup(), eager.warmup()
        model.shutdown()


def test_points_of_both_ranks_are_whole(pair: tuple[InterpModel, InterpModel]) -> None:
    model, eager = pair
    common = [a for a in served(model) if a.name not in ROUTER]
    found, wanted = run_with_cache(model, PROMPTS, common), run_with_cache(eager, PROMPTS, common)
    far = {str(a): apart(found[a], wanted[a]) for a in common}
    assert max(far.values()) < TIGHT, {a: d for a, d in far.items() if d >= TIGHT}
    found, wanted = (run_with_cache(m, PROMPTS[0], ["z.1.head-3", "mlp_out.1"]) for m in pair)
    assert apart(found["z.1.head-3"], wanted["z.1.head-3"]) < TIGHT
    swapped = run_with_cache(eager, PROMPTS[0], ["z.1.head-1"])["z.1.head-1"]
    assert apart(found["z.1.head-3"], swapped) > 100 * TIGHT


def test_writes_use_the_whole_row(pair: tuple[InterpModel, InterpModel]) -> None:
    """A projection along a vector that spans both ranks is right only if neither rank computed it alone."""
    model, _ = pair
    plain = run_with_cache(model, PROMPTS[0], ["final_norm"])["final_norm"]
    for address in served(model, write=True):
        if address.layer not in (None, 1) or address.name in ROUTER:
            continue
        shape = torch.Size(model.profile.shape(address))
        vector = torch.linspace(-3, 5, shape.numel()).reshape(shape)
        for operation in (Add(address, vector, scale=2.0), Scale(address, vector, factor=-1.5)):
            results = [run_with_cache(m, PROMPTS[0], ["final_norm", address], steering=[operation]) for m in pair]
            for key in dict.fromkeys(["final_norm", str(address)]):
                assert apart(results[0][key], results[1][key]) < 3 * TIGHT, (address, type(operation).__name__)
            assert apart(results[0]["final_norm"], plain) > 30 * TIGHT, (address, type(operation).__name__)


def test_generation_steering_and_lens_over_ranks(pair: tuple[InterpModel, InterpModel]) -> None:
    model, _ = pair
    vector = torch.linspace(-1, 1, model.d_model)
    results = []
    for one in pair:
        with one.steer(Add("resid_post.1", vector, scale=3.0)):
            results.append(one.capture_generation(PROMPTS[0], ["attn_probs.2", "z.2"], max_tokens=5))
    (mine, rows), (theirs, wanted) = results
    assert mine.token_ids == theirs.token_ids
    assert all(apart(rows[key], wanted[key]) < TIGHT for key in ("attn_probs.2", "z.2"))
    first, second = (m.logit_lens(PROMPTS[0], top_k=3) for m in pair)
    assert torch.equal(first.top_ids, second.top_ids)
