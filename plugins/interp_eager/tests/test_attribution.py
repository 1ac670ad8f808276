"""Attribution, sweeps, direct attribution and transported lenses, each against what it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import save
from tiny_families import PROMPT

from interp_core import (
    Ablate,
    Add,
    AddressError,
    Cache,
    CapabilityUnsupported,
    InterpModel,
    Replace,
    RequestError,
    attribute,
    direct_attribution,
    load_model,
    logit_lens,
    run_with_cache,
    steer,
    sweep,
)
from interp_core.checks import difference
from interp_core.logits import finished

SOURCE = [8, 31, 200, 77, 3, 14, 9, 60, 2, 40]
WANTED, OTHER = 17, 99


@pytest.fixture(scope="module")
def graded(folders: Path) -> Iterator[InterpModel]:
    """A tiny Gemma 2 (softcaps, sandwich norms, windows) with gradients."""
    with load_model(save("gemma2", folders), "eager", dtype="float32", requires_grad=True) as model:
        yield model


def logit(model: InterpModel, prompt: Any, steering: Any = None) -> float:
    rows = run_with_cache(model, prompt, ["lm_head"], positions="last", steering=steering)["lm_head"][0, 0]
    rows = finished(rows, model.facts)
    return float(rows[WANTED] - rows[OTHER])


def test_attribution_is_the_gradient_times_the_value(graded: InterpModel) -> None:
    points = ["resid_post.*", "z.2", "mlp_act.1.neuron-3"]
    found = attribute(graded, PROMPT, points, (WANTED, OTHER))
    assert difference(found.metric, torch.tensor([logit(graded, PROMPT)])) < 1e-5
    for address in found.scores:
        assert torch.equal(found.scores[address], found.gradients[address] * found.activations[address])
        assert not found.scores[address].requires_grad
        assert torch.equal(found.activations[address], run_with_cache(graded, PROMPT, [address])[address])
    assert found.total("z.2").shape == (1, len(PROMPT), graded.n_heads)
    # To first order it is what a small write along the value itself changes.
    value = found.activations["z.2"][0, 7]
    size = 1e-2
    moved = logit(graded, PROMPT, [Add("z.2", value, scale=size)])
    with steer(graded, [Add("z.2", value, scale=size)], positions=[7]):
        moved = logit(graded, PROMPT)
    predicted = size * float((found.gradients["z.2"][0, 7] * value).sum())
    assert abs(moved - logit(graded, PROMPT) - predicted) < 0.05 * abs(predicted) + 1e-5


def test_a_batch_is_attributed_prompt_by_prompt(graded: InterpModel) -> None:
    both = attribute(graded, [PROMPT, SOURCE[:6]], ["resid_post.1", "value.2"], lambda logits: logits[-1, WANTED])
    for number, prompt in enumerate((PROMPT, SOURCE[:6])):
        alone = attribute(graded, prompt, ["resid_post.1", "value.2"], WANTED)
        for address in alone.scores:
            rows = both.scores[address][number, : len(prompt)]
            assert difference(rows, alone.scores[address][0]) < 1e-4
            assert difference(rows, alone.scores[address][0].roll(1, 0)) > 1e-2
    assert not both.scores["resid_post.1"][1, 6:].any()


def test_attribution_patching_approximates_patching(folders: Path) -> None:
    """A baseline close to the run: there the first order is all that matters; the wrong sign is not."""
    with load_model(save("llama", folders), "eager", dtype="float32", requires_grad=True) as model:
        cache = run_with_cache(model, PROMPT, ["resid_post.1"])
        noise = torch.randn(cache["resid_post.1"].shape, generator=torch.Generator().manual_seed(0))
        near = Cache(
            {next(iter(cache)): cache["resid_post.1"] * 1.0 + 1e-3 * noise}, cache.tokens, cache.lengths, cache.offsets
        )
        found = attribute(model, PROMPT, ["resid_post.1"], (WANTED, OTHER), baseline=near)
        real = sweep(model, PROMPT, ["resid_post.1"], (WANTED, OTHER), put=near)
        predicted = found.total("resid_post.1")[0]
        assert (real.effects[0] - predicted).norm() < 0.05 * predicted.norm()
        assert (real.effects[0] + predicted).norm() > predicted.norm()
        by_prompt = attribute(model, PROMPT, ["resid_post.1"], WANTED, baseline=SOURCE)
        other = run_with_cache(model, SOURCE, ["resid_post.1"])["resid_post.1"]
        wanted = by_prompt.gradients["resid_post.1"] * (other - by_prompt.activations["resid_post.1"])
        assert torch.equal(by_prompt.scores["resid_post.1"], wanted)


def test_attribution_refuses_what_it_cannot_say(graded: InterpModel, llama: InterpModel) -> None:
    with pytest.raises(CapabilityUnsupported, match="requires_grad=True"):
        attribute(llama, PROMPT, ["resid_post.1"], WANTED)
    with pytest.raises(RequestError, match="has no row"):
        attribute(graded, PROMPT, ["attn_probs.1"], WANTED)
    with pytest.raises(RequestError, match="name some"):
        attribute(graded, PROMPT, [], WANTED)
    with pytest.raises(RequestError, match="one number"):
        attribute(graded, PROMPT, ["resid_post.1"], lambda logits: logits)
    with pytest.raises(RequestError, match="metric failed"):
        attribute(graded, PROMPT, ["resid_post.1"], lambda logits: logits[99, 99])
    with pytest.raises(RequestError, match="from 0 to 299"):
        attribute(graded, PROMPT, ["resid_post.1"], 300)
    with pytest.raises(RequestError, match="a pair"):
        attribute(graded, PROMPT, ["resid_post.1"], (1, 2, 3))
    with pytest.raises(RequestError, match="prompts of"):
        attribute(graded, PROMPT, ["resid_post.1"], WANTED, baseline=SOURCE[:4])
    with pytest.raises(RequestError, match="holds no z"):
        attribute(graded, PROMPT, ["z.0"], WANTED, baseline=run_with_cache(graded, SOURCE, ["z.1"]))
    with pytest.raises(AddressError):
        attribute(graded, PROMPT, ["resid_post.9"], WANTED)


def test_patching_everything_at_a_layer_gives_the_sources_own_metric(llama: InterpModel) -> None:
    """And patching a prompt with itself changes nothing."""
    found = sweep(llama, PROMPT, ["resid_post.*"], (WANTED, OTHER), put=SOURCE, together=True)
    assert found.positions == (tuple(range(10)),)
    source = logit(llama, SOURCE)
    assert abs(found.plain - logit(llama, PROMPT)) < 1e-5
    assert (found.values[:, 0] - source).abs().max() < 1e-5
    assert abs(found.plain - source) > 1e-3
    same = sweep(llama, PROMPT, ["resid_post.*", "z.1"], (WANTED, OTHER), put=PROMPT)
    assert same.values.shape == (5, 10)
    assert same.effects.abs().max() < 1e-5


def test_a_sweep_over_heads_is_one_run_each(llama: InterpModel) -> None:
    found = sweep(llama, PROMPT, ["z.1-2"], (WANTED, OTHER), each="head", positions=[3, 9], batch_size=3)
    assert [str(a) for a in found.addresses[:2]] == ["z.1.head-0", "z.1.head-1"]
    assert found.by_head().shape == (2, llama.n_heads, 2)
    for row, address in enumerate(found.addresses):
        for column, position in enumerate((3, 9)):
            with steer(llama, [Ablate(address)], positions=[position]):
                assert abs(logit(llama, PROMPT) - float(found.values[row, column])) < 1e-5
    assert found.effects.abs().max() > 1e-3
    with pytest.raises(RequestError, match="one coordinate"):
        sweep(llama, PROMPT, ["z.1"], WANTED).by_head()


def test_a_sweep_puts_vectors_operations_and_respects_steering(llama: InterpModel) -> None:
    mean = run_with_cache(llama, SOURCE, ["mlp_out.2"])["mlp_out.2"][0].mean(0)
    means = sweep(llama, PROMPT, ["mlp_out.2"], (WANTED, OTHER), put={"mlp_out.2": mean}, together=True)
    assert abs(float(means.values[0, 0]) - logit(llama, PROMPT, [Replace("mlp_out.2", mean)])) < 1e-5
    before = [Add("resid_pre.1", torch.ones(48))]
    own = sweep(
        llama, PROMPT, ["mlp_out.2"], (WANTED, OTHER), put=lambda a: Add(a, mean), positions="last", steering=before
    )
    assert abs(own.plain - logit(llama, PROMPT, before)) < 1e-5
    with steer(llama, before), steer(llama, [Add("mlp_out.2", mean)], positions="last"):
        assert abs(float(own.values[0, 0]) - logit(llama, PROMPT)) < 1e-5


def test_a_sweep_refuses_what_does_not_fit(llama: InterpModel) -> None:
    run = run_with_cache(llama, SOURCE, ["resid_post.1"])
    for match, arguments in {
        "prompts of": {"put": SOURCE[:5]},
        "at all positions": {"put": run_with_cache(llama, SOURCE, ["resid_post.1"], positions=[1])},
        "holds no resid_post.2": {"put": run, "points": ["resid_post.1", "resid_post.2"]},
        "no vector for": {"put": {"resid_post.0": torch.zeros(48)}},
        "zero": {"put": "mean"},
        "has no head": {"each": "head"},
        "unknown coordinate": {"each": "heads"},
        "name some": {"points": []},
        "select nothing": {"positions": slice(40, 50)},
        "one prompt": {"tokens": [PROMPT, SOURCE]},
        "batch_size": {"batch_size": 0},
    }.items():
        given: dict[str, Any] = {"tokens": PROMPT, "points": ["resid_post.1"], "metric": WANTED, **arguments}
        with pytest.raises(RequestError, match=match):
            sweep(llama, **given)
    with pytest.raises(CapabilityUnsupported):
        sweep(llama, PROMPT, ["attn_scores.1"], WANTED)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "cohere", "olmo2", "gpt_neox"])
@pytest.mark.parametrize("heads", [False, True])
def test_direct_shares_add_up_to_the_logit(family: str, heads: bool, folders: Path) -> None:
    with load_model(save(family, folders), "eager", dtype="float32") as model:
        raw = run_with_cache(model, PROMPT, ["lm_head"])["lm_head"][0]
        for position in (-1, 3):
            found = direct_attribution(model, PROMPT, WANTED, against=OTHER, position=position, heads=heads)
            wanted = raw[position, WANTED] - raw[position, OTHER]
            assert abs(found.logit - float(wanted)) < 1e-4 * max(1.0, abs(float(wanted)))
            assert abs(float(found.shares.sum()) - found.logit) < 1e-4 * float(found.shares.abs().sum())
            # Which is no accident of their sum: without the largest one they do not add up.
            assert abs(found.top(1)[0][1]) > 1e-3 * float(found.shares.abs().sum())
        expected = 2 + 2 * model.n_layers + (heads * model.n_layers * model.n_heads)
        assert len(found.names) == len(found.shares) == expected


def test_a_share_is_what_its_contribution_does_through_a_fixed_norm(llama: InterpModel) -> None:
    """By hand on one layer, from the model's own weights."""
    found = direct_attribution(llama, PROMPT, WANTED)
    cache = run_with_cache(llama, PROMPT, ["mlp_out_post.2", "resid_post.3"], positions="last")
    network = llama.session.backend().model
    x, part = cache["resid_post.3"][0, 0], cache["mlp_out_post.2"][0, 0]
    divisor = (x.square().mean() + llama.facts.norm_eps).sqrt()
    by_hand = network.lm_head.weight[WANTED] @ (network.model.norm.weight * part / divisor)
    share = dict(zip(found.names, found.shares.tolist(), strict=True))["mlp_out_post.2"]
    assert abs(share - float(by_hand)) < 1e-5


def test_a_heads_share_is_the_change_of_its_own_output(llama: InterpModel) -> None:
    found = dict(direct_attribution(llama, PROMPT, WANTED, heads=True).top(100))
    attention = llama.session.backend().model.model.layers[3].self_attn.o_proj
    cache = run_with_cache(llama, PROMPT, ["z.3", "resid_post.3"], positions="last")
    z = cache["z.3"][0, 0]
    alone = torch.zeros_like(z)
    alone[2] = z[2]
    part = torch.nn.functional.linear(alone.flatten(), attention.weight)
    x = cache["resid_post.3"][0, 0]
    network = llama.session.backend().model
    divisor = (x.square().mean() + llama.facts.norm_eps).sqrt()
    by_hand = network.lm_head.weight[WANTED] @ (network.model.norm.weight * part / divisor)
    assert abs(found["z.3.head-2"] - float(by_hand)) < 1e-5


def test_direct_attribution_refuses(llama: InterpModel, folders: Path) -> None:
    with pytest.raises(RequestError, match="one of its positions"):
        direct_attribution(llama, PROMPT, WANTED, position=10)
    with pytest.raises(RequestError, match="one of its positions"):
        direct_attribution(llama, [PROMPT, SOURCE], WANTED)
    with pytest.raises(RequestError, match="from 0 to 299"):
        direct_attribution(llama, PROMPT, -1)


def test_a_lens_through_a_callers_map(llama: InterpModel) -> None:
    """With the true rest of the forward as the map, every layer says what the last one does."""
    last = run_with_cache(llama, PROMPT, ["resid_post.3"])["resid_post.3"][0]
    carried = logit_lens(llama, PROMPT, transport=lambda layer, rows: last)
    plain = logit_lens(llama, PROMPT)
    assert torch.equal(carried.top_ids[0], plain.top_ids[-1])
    assert not torch.equal(plain.top_ids[0], plain.top_ids[-1])
    same = logit_lens(llama, PROMPT, transport={layer: torch.eye(48) for layer in range(4)})
    assert torch.equal(same.top_ids, plain.top_ids)
    turned = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(5)))[0]
    by_matrix = logit_lens(llama, PROMPT, [1], transport={1: turned})
    by_call = logit_lens(llama, PROMPT, [1], transport=lambda layer, rows: rows @ turned.T)
    assert torch.equal(by_matrix.top_ids, by_call.top_ids)
    for match, transport in {
        "no map for layer 0": {1: turned},
        "not a square": {layer: torch.zeros(3, 3) for layer in range(4)},
        "gave": lambda layer, rows: rows[:1],
    }.items():
        with pytest.raises(RequestError, match=match):
            logit_lens(llama, PROMPT, transport=transport)
