"""Blocks that differ from layer to layer, add up several terms, or weigh the residual: every point by identities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hybrids
import pytest
import torch
from checks import TIGHT, check_logits, check_writes, hf_logits, module
from tiny_families import PROMPT

from interp_core import CapabilityUnsupported, InterpModel, load_model, run_with_cache
from interp_core.checks import difference
from interp_core.verify import verify


@pytest.fixture(scope="module", params=sorted(hybrids.HYBRIDS))
def hybrid(request: pytest.FixtureRequest, folders: Path) -> Iterator[tuple[str, InterpModel]]:
    """One tiny model of each, float32, with its name."""
    with load_model(hybrids.save(request.param, folders), backend="eager", dtype="float32") as model:
        yield request.param, model


def loaded(name: str, folders: Path) -> InterpModel:
    return load_model(hybrids.save(name, folders), backend="eager", dtype="float32")


def test_every_point_is_proven_or_absent(hybrid: tuple[str, InterpModel]) -> None:
    found = verify(hybrid[1], PROMPT)
    assert found.ok, found.failed()
    assert not found.places("unchecked")


def test_every_block_adds_up(hybrid: tuple[str, InterpModel]) -> None:
    """In each block, what sublayers add makes its output of its input, and the raw outputs alone do not."""
    _, model = hybrid
    sums = {}
    for check in verify(model, PROMPT).checks:
        if check.identity.endswith(("is resid_mid", "is resid_post")) and check.layer is not None:
            sums.setdefault(check.layer, []).append(check)
    assert sorted(sums) == list(range(model.n_layers))
    for checks in sums.values():
        assert any(check.identity.endswith("is resid_post") for check in checks)
        assert all(check.proof for check in checks)


def test_logits(hybrid: tuple[str, InterpModel]) -> None:
    check_logits(hybrid[1])


def test_writes_at_every_point(hybrid: tuple[str, InterpModel]) -> None:
    check_writes(hybrid[1], {None, *range(hybrid[1].n_layers)}, exact=False)


def test_mixers_without_softmax_refuse_its_points_per_layer(hybrid: tuple[str, InterpModel]) -> None:
    _, model = hybrid
    for layer in model.facts.layers:
        for point in ("attn_scores", "attn_probs", "value", "z"):
            refusal = model.refusal(f"{point}.{layer.index}")
            if not layer.softmax:
                assert isinstance(refusal, CapabilityUnsupported)
                assert layer.mixer in refusal.why or "no token mixer" in refusal.why
            elif layer.kv_shared_from is None:
                assert refusal is None
        assert (model.refusal(f"attn_out_post.{layer.index}") is None) == (layer.mixer != "none")


def test_capture_while_generating_equals_one_forward(hybrid: tuple[str, InterpModel]) -> None:
    _, model = hybrid
    points = [f"resid_post.{i}" for i in range(model.n_layers)]
    points += [p for p in ("lm_head", "attn_out_post.1", "mlp_out_post.1", "attn_probs.1") if model.supports(p)]
    completion, grown = model.capture_generation(PROMPT, points, max_tokens=6, ignore_eos=True)
    whole = [*PROMPT, *completion.token_ids[:-1]]
    once = run_with_cache(model, whole, points)
    for key in points:
        assert difference(grown[key], once[key]) < TIGHT, key
    greedy = [int(row.argmax()) for row in hf_logits(model, whole)[len(PROMPT) - 1 :]]
    assert list(completion.token_ids) == greedy


def test_a_prompt_of_one_token_generates_alike_after_another_generation(hybrid: tuple[str, InterpModel]) -> None:
    """Some mixers keep their state in the module itself: it must not reach the next generation."""
    _, model = hybrid
    model.generate(PROMPT, max_tokens=3, ignore_eos=True)
    tokens = list(model.generate([7], max_tokens=4, ignore_eos=True).token_ids)
    greedy = [int(row.argmax()) for row in hf_logits(model, [7, *tokens[:-1]])]
    assert tokens == greedy


def test_states_in_modules_belong_to_one_generation(folders: Path) -> None:
    with loaded("recurrent_gemma", folders) as model:
        prompts = [PROMPT, [3, 88, 17, 290, 4, 5, 6]]
        alone = [list(model.generate(prompt, max_tokens=6, ignore_eos=True).token_ids) for prompt in prompts]
        streams = [model.generate_stream(prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
        turns = [[chunk.token_id for chunk in pair] for pair in zip(*streams, strict=True)]
        assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone


def test_two_mixers_each_with_a_factor_of_its_own(folders: Path) -> None:
    """The contribution is their sum; neither mixer's output, nor their sum without the factors, is."""
    with loaded("falcon_h1", folders) as model, torch.no_grad():
        assert model.facts.layers[0].second_mixer == "state_space"
        cache = run_with_cache(model, PROMPT, ["resid_pre.1", "attn_out.1", "attn_out_post.1", "attn_in.1"])
        normed = module(model, "block", 1).input_layernorm(cache["resid_pre.1"])
        beside = module(model, "attn.beside", 1)(normed)
        both = 0.9 * beside + 0.6 * cache["attn_out.1"]
        assert difference(both, cache["attn_out_post.1"]) < TIGHT
        assert difference(0.7 * normed, cache["attn_in.1"]) < TIGHT
        for wrong in (beside + cache["attn_out.1"], 0.6 * cache["attn_out.1"], cache["attn_out.1"]):
            assert difference(wrong, cache["attn_out_post.1"]) > 1000 * TIGHT


def test_the_normed_tensor_is_what_a_contribution_is_added_to(folders: Path) -> None:
    with loaded("minimax", folders) as model:
        points = [f"{name}.{i}" for name in ("resid_pre", "attn_in", "attn_out", "resid_mid") for i in (0, 1)]
        cache = run_with_cache(model, PROMPT, points)
        for layer, (alpha, beta) in enumerate(((1.1, 1.0), (1.0, 0.8))):
            added = beta * cache[f"attn_out.{layer}"]
            assert difference(alpha * cache[f"attn_in.{layer}"] + added, cache[f"resid_mid.{layer}"]) < TIGHT
            assert difference(cache[f"resid_pre.{layer}"] + added, cache[f"resid_mid.{layer}"]) > 1000 * TIGHT


def test_weights_of_the_checkpoint_on_residual_and_contributions(folders: Path) -> None:
    with loaded("gemma4", folders) as model, torch.no_grad():
        cache = run_with_cache(model, PROMPT, ["resid_mid.1", "mlp_out_post.1", "resid_post.1"])
        scalar = module(model, "block", 1).layer_scalar
        kept, added = cache["resid_mid.1"], cache["mlp_out_post.1"]
        assert difference(scalar * kept + added, cache["resid_post.1"]) < TIGHT
        assert difference(kept + added, cache["resid_post.1"]) > 1000 * TIGHT
    with loaded("zaya", folders) as model, torch.no_grad():
        cache = run_with_cache(model, PROMPT, ["resid_pre.1", "attn_out.1", "attn_out_post.1", "resid_mid.1"])
        join = module(model, "attn_join", 1)
        assert difference(join(cache["attn_out.1"], cache["resid_pre.1"]), cache["resid_mid.1"]) < TIGHT
        assert difference(cache["attn_out.1"], cache["attn_out_post.1"]) > 1000 * TIGHT
        rest = cache["resid_mid.1"] - cache["attn_out_post.1"]
        assert difference((cache["resid_pre.1"] + join.residual_bias) * join.residual_scale, rest) < TIGHT


@pytest.mark.parametrize(("name", "why"), [("cpmant", "slots of a learned prompt"), ("hrm_text", "run in a loop")])
def test_trunks_without_blocks_serve_their_ends(name: str, why: str, folders: Path) -> None:
    with loaded(name, folders) as model:
        for point in ("resid_post.0", "attn_out.0", "mlp_act.1", "final_norm"):
            refusal = model.refusal(point)
            assert isinstance(refusal, CapabilityUnsupported)
            assert refusal.instead
        assert why in str(model.refusal("resid_pre.0"))
        assert why in str(model.refusal("logit_lens"))
        head = run_with_cache(model, PROMPT, ["lm_head"])["lm_head"][0]
        assert torch.equal(head, hf_logits(model, PROMPT))
        completion, grown = model.capture_generation(PROMPT, ["lm_head"], max_tokens=5, ignore_eos=True)
        assert difference(grown["lm_head"][0][: len(PROMPT)], head) < TIGHT
        assert list(completion.token_ids) == own_generation(model, 5)
        assert list(completion.token_ids) == [int(row.argmax()) for row in grown["lm_head"][0][len(PROMPT) - 1 :]]
        assert verify(model, PROMPT).points["lm_head"] == "proven"


def own_generation(model: InterpModel, count: int) -> list[int]:
    """What transformers' own greedy generation gives."""
    backend: Any = model.session.backend()
    ids = torch.tensor([PROMPT])
    out = backend.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in out[0, len(PROMPT) :]]
