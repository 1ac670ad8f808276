"""Every family on a real engine, by vLLM's own class and through its Transformers backend, against eager.

The eager numbers have been proven by identities in that plugin's own tests; here each served address of each layer
has to equal them, and each write has to change what it changes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm_families
from vllm_families import NATIVE, PROMPTS, THROUGH_TRANSFORMERS, Loader

from interp_core import Add, BackendUnavailable, InterpModel, run_with_cache
from interp_core.address import Address
from interp_core.checks import difference
from interp_core.verify import verify

pytestmark = pytest.mark.vllm

TIGHT = 1e-5
ROUTER = {"router_logits", "expert_weights", "expert_indices"}
CASES = [*((name, "vllm") for name in NATIVE), *((name, "transformers") for name in THROUGH_TRANSFORMERS)]
Pair = tuple[InterpModel, InterpModel]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def pair(request: pytest.FixtureRequest, loaded: Loader) -> Iterator[Pair]:
    """A family on vLLM and on eager."""
    family, impl = request.param
    model, eager = loaded(family, model_impl=impl), loaded(family, "eager")
    yield model.warmup(), eager.warmup()
    model.shutdown()
    eager.shutdown()


def served(model: InterpModel, *, write: bool = False) -> list[Address]:
    found = []
    for spec in model.points():
        for layer in range(model.n_layers) if spec.scope == "layer" else [None]:
            address = Address(spec.name, layer)
            if model.profile.refusal(address, write=write) is None:
                found.append(address)
    return found


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest difference relative to the largest value; what is masked must be masked on both sides."""
    live = y > -1e30
    if x.shape != y.shape or not bool((live == (x > -1e30)).all()):
        return float("inf")
    return difference(x[live].float(), y[live].float())


def test_every_served_point_equals_eagers(pair: Pair) -> None:
    model, eager = pair
    here = served(model)
    assert {a.name for a in here} - ROUTER == {a.name for a in served(eager)} - ROUTER
    common = [a for a in here if a.name not in ROUTER]
    found, wanted = run_with_cache(model, PROMPTS, common), run_with_cache(eager, PROMPTS, common)
    far = {str(a): apart(found[a], wanted[a]) for a in common}
    assert max(far.values()) < TIGHT, {a: d for a, d in far.items() if d >= TIGHT}
    for address in common:
        if address.layer is not None and address.name not in ("attn_scores", "attn_probs"):
            other = Address(address.name, (address.layer + 1) % model.n_layers)
            if other in found:
                assert apart(found[other], wanted[address]) > 10 * TIGHT, address


def test_the_identities_hold_on_the_engine_itself(pair: Pair) -> None:
    found = verify(pair[0], PROMPTS[0])
    assert found.ok, found.failed()
    assert sum(check.control is not None for check in found.checks) >= 4 * pair[0].n_layers


def test_every_write_changes_what_it_changes_on_eager(pair: Pair) -> None:
    model, eager = pair
    prompt, layer = PROMPTS[0], 1
    ends: list[Any] = [Address("resid_post", model.n_layers - 1), Address("final_norm")]
    plain = run_with_cache(model, prompt, ends)
    writable = [a for a in served(model, write=True) if a.layer in (None, layer) and a.name not in ROUTER]
    assert len(writable) > 10
    for address in writable:
        shape = torch.Size(model.profile.shape(address))
        vector = torch.linspace(-3, 5, shape.numel()).reshape(shape)
        nothing = run_with_cache(model, prompt, ends, steering=[Add(address, torch.zeros(shape))])
        assert all(torch.equal(nothing[end], plain[end]) for end in ends), address
        with model.steer(Add(address, vector, scale=2.0), positions=[2, 5]):
            found = run_with_cache(model, prompt, [*ends, address])
        with eager.steer(Add(address, vector, scale=2.0), positions=[2, 5]):
            wanted = run_with_cache(eager, prompt, [*ends, address])
        for key in dict.fromkeys([*ends, address]):
            assert apart(found[key], wanted[key]) < 2 * TIGHT, (address, key)
        assert apart(found[ends[1]], plain[ends[1]]) > 100 * TIGHT, address
        assert torch.equal(found[ends[1]][0, :2], plain[ends[1]][0, :2]), address


def test_generation_logprobs_and_lens_equal_eagers(pair: Pair) -> None:
    model, eager = pair
    found = model.generate(PROMPTS, max_tokens=5, n_logprobs=4)
    wanted = eager.generate(PROMPTS, max_tokens=5, n_logprobs=4)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert [p.token_id for p in a] == [p.token_id for p in b]
            assert max(abs(x.logprob - y.logprob) for x, y in zip(a, b, strict=True)) < 1e-4
    rows = run_with_cache(eager, PROMPTS[0], ["resid_post.2"])["resid_post.2"][0]
    assert difference(model.decode_residuals(rows), eager.decode_residuals(rows)) < TIGHT
    assert difference(model.decode_residuals(rows.roll(1, 0)), eager.decode_residuals(rows)) > 100 * TIGHT
    mine, theirs = model.logit_lens(PROMPTS[0], top_k=3), eager.logit_lens(PROMPTS[0], top_k=3)
    assert torch.equal(mine.top_ids, theirs.top_ids)
    assert difference(mine.top_probs, theirs.top_probs) < 1e-4


def test_what_cannot_go_through_transformers_is_refused_before_anything_starts(loaded: Loader) -> None:
    model = loaded("gpt2", model_impl="transformers")
    with pytest.raises(BackendUnavailable, match="cannot load gpt2"):
        model.warmup()


def test_every_family_is_tried_in_every_way() -> None:
    assert {family for family, _ in CASES} == set(vllm_families.FAMILIES)
