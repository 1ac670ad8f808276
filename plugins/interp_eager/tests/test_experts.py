"""Points inside mixtures of experts: against the experts' own weights combined by hand, bare hooks, and writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_families
import pytest
import torch
from checks import TIGHT, module
from tiny_families import PROMPT
from torch import Tensor

from interp_core import Ablate, Add, CapabilityUnsupported, InterpModel, Replace, load_model, run_with_cache
from interp_core.checks import difference
from interp_core.identities_experts import expert_identities
from interp_core.requests import ForwardRequest, Read
from interp_core.steering import as_steering, writes_for

POINTS = ("router_logits", "expert_weights", "expert_indices")
SUMS = {
    "dots1": 2.5,
    "exaone_moe": 2.5,
    "solar_open": 2.5,
    "afmoe": 2.5,
    "lfm2_moe": 1.5,
    "hy_v3": 2.5,
    "laguna": 2.5,
    "mimo_v2_flash": 2.5,
    "cohere2_moe": 0.5,
}
"""What the weights of a token sum to, where that is a constant other than 1."""


@pytest.fixture(scope="session", params=sorted({*moe_families.FAMILIES} - {"llama4_text"}))
def family(request: pytest.FixtureRequest, folders: Path) -> Iterator[tuple[str, InterpModel]]:
    """One tiny model of each family, float32, with the family's name."""
    with load_model(moe_families.save(request.param, folders), backend="eager", dtype="float32") as model:
        yield request.param, model


WRITTEN = ("afmoe", "dbrx", "hunyuan_v1_moe", "jamba")
"""Families of which changed logits change the choice."""


def sparse(model: InterpModel) -> list[int]:
    return [layer.index for layer in model.facts.layers if layer.mlp == "sparse"]


def addresses(model: InterpModel, *names: str) -> list[str]:
    return [f"{name}.{layer}" for layer in sparse(model) for name in names]


def mixed(family: str, model: InterpModel, layer: int, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """``[pos, d_model]``: each row's experts, weighted."""
    experts, count = module(model, "mlp.experts", layer), model.facts.layers[layer].n_experts
    outputs = torch.stack([moe_families.expert(family, experts, number, x) for number in range(count)], dim=1)
    picked = outputs.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
    return (picked * weights[..., None]).sum(1)


def routed(family: str, model: InterpModel, layer: int, x: Tensor, out: Tensor) -> Tensor:
    """The block's output without what every token gets."""
    beside = family in ("granitemoeshared", "granitemoe_swa")
    return out - moe_families.shared(family, module(model, "block" if beside else "mlp", layer), x)


def test_identity_7_the_experts_combined_by_hand_are_the_block(family: tuple[str, InterpModel]) -> None:
    name, model = family
    names = ("mlp_in", "expert_weights", "expert_indices", "mlp_out")
    cache = run_with_cache(model, PROMPT, addresses(model, "router_logits", *names))
    assert sparse(model)
    for layer in sparse(model):
        facts = model.facts.layers[layer]
        x, weights, chosen, out = (cache[f"{point}.{layer}"][0] for point in names)
        assert weights.shape == chosen.shape == (len(PROMPT), facts.top_k)
        assert cache[f"router_logits.{layer}"][0].shape == (len(PROMPT), facts.n_experts)
        assert chosen.dtype == torch.int64
        total = weights.sum(-1, keepdim=True)
        wrong = [(weights, chosen.flip(-1)), (weights, (chosen + 1) % facts.n_experts)]
        if difference(total, torch.ones_like(total)) > 0.01:
            wrong.append((weights / total, chosen))
        with torch.no_grad():
            want = routed(name, model, layer, x, out)
            assert difference(mixed(name, model, layer, x, weights, chosen), want) < TIGHT
            for other_weights, other in wrong:
                assert difference(mixed(name, model, layer, x, other_weights, other), want) > 100 * TIGHT


def test_weights_are_the_models_own_and_not_renormalised(family: tuple[str, InterpModel]) -> None:
    name, model = family
    cache = run_with_cache(model, PROMPT, addresses(model, "expert_weights"))
    for layer in sparse(model):
        total = cache[f"expert_weights.{layer}"][0].sum(-1)
        if model.facts.routing.shares:
            assert difference(total, torch.full_like(total, SUMS.get(name, 1.0))) < TIGHT
        else:
            assert float(total.max() - total.min()) > 0.005


def test_weights_and_choice_by_the_routers_logits(family: tuple[str, InterpModel]) -> None:
    _, model = family
    cache = run_with_cache(model, PROMPT, addresses(model, *POINTS))
    for layer in sparse(model):
        found = list(
            expert_identities(model.facts, model.facts.layers[layer], lambda n, i: cache[f"{n}.{i}"][0], TIGHT)
        )
        assert len(found) == 1 + model.facts.routing.ranked
        assert all(check.holds and check.control is not None for check in found), found


def test_identity_10_bare_hooks(family: tuple[str, InterpModel]) -> None:
    _, model = family
    seen: dict[str, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, args: Any) -> None:
            weights, indices = (
                (t for t in args[1:] if t.is_floating_point()),
                (t for t in args[1:] if not t.is_floating_point()),
            )
            seen[f"expert_weights.{layer}"] = next(weights).clone()
            seen[f"expert_indices.{layer}"] = next(indices).clone()

        return hook

    def router(layer: int) -> Any:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            parts = [out] if torch.is_tensor(out) else [part for part in out if torch.is_tensor(part)]
            wide = [part for part in parts if part.shape[-1] == model.facts.layers[layer].n_experts]
            seen[f"router_logits.{layer}"] = wide[0].clone()

        return hook

    handles = [module(model, "mlp.experts", layer).register_forward_pre_hook(keep(layer)) for layer in sparse(model)]
    handles += [module(model, "mlp.router", layer).register_forward_hook(router(layer)) for layer in sparse(model)]
    try:
        cache = run_with_cache(model, PROMPT, addresses(model, *POINTS))
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 3 * len(sparse(model))
    for key, want in seen.items():
        if key.startswith("expert_weights"):
            want = want * model.facts.routing.factor  # noqa: PLW2901 - what the model multiplies behind the experts
        assert torch.equal(cache[key][0], want.unflatten(0, (1, -1))[0] if want.dim() == 2 else want[0]), key


def test_identity_8_changed_weights_change_the_logits(family: tuple[str, InterpModel]) -> None:
    _, model = family
    layer, ends = sparse(model)[0], ["lm_head", f"mlp_out.{sparse(model)[0]}"]
    plain = run_with_cache(model, PROMPT, ends)
    zero = torch.zeros(model.facts.layers[layer].top_k)
    same = run_with_cache(model, PROMPT, ends, steering=[Add(f"expert_weights.{layer}", zero)])
    assert all(torch.equal(same[key], plain[key]) for key in ends)
    with model.steer(Ablate(f"expert_weights.{layer}"), positions=[4]):
        without = run_with_cache(model, PROMPT, [*ends, f"expert_weights.{layer}"])
    assert not without[f"expert_weights.{layer}"][0, 4].any()
    assert torch.equal(without[ends[1]][0, :4], plain[ends[1]][0, :4])
    assert difference(without[ends[0]][0, 4], plain[ends[0]][0, 4]) > 1e-4


def test_identity_8_writes_go_where_they_were_asked_for(family: tuple[str, InterpModel]) -> None:
    """A zero is nothing; a vector is added at its position alone, is read there, and changes what follows."""
    _, model = family
    layer = sparse(model)[-1]
    ends = [f"mlp_out.{layer}", "lm_head"]
    for name in ("expert_weights", "router_logits"):
        address = f"{name}.{layer}"
        if model.refusal(address, write=True):
            continue
        plain = run_with_cache(model, PROMPT, [*ends, address])
        vector = torch.linspace(-3, 5, plain[address].shape[-1])
        same = run_with_cache(model, PROMPT, [*ends, address], steering=[Add(address, 0 * vector)])
        assert all(torch.equal(same[key], plain[key]) for key in plain)
        with model.steer(Add(address, vector), positions=[4]):
            changed = run_with_cache(model, PROMPT, [*ends, address])
        rest = [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert difference(changed[address][0, 4], plain[address][0, 4] + vector) < TIGHT
        assert torch.equal(changed[address][0, rest], plain[address][0, rest])
        assert difference(changed[ends[0]][0, rest], plain[ends[0]][0, rest]) < TIGHT
        assert all(difference(changed[end][0, 4], plain[end][0, 4]) > 100 * TIGHT for end in ends)


def test_writing_router_logits_changes_the_choice_or_is_refused(family: tuple[str, InterpModel]) -> None:
    name, model = family
    layer = sparse(model)[0]
    address, points = f"router_logits.{layer}", [f"{p}.{layer}" for p in ("mlp_in", *POINTS, "mlp_out")]
    if not model.facts.routing.logits_module:
        assert name not in WRITTEN
        with pytest.raises(CapabilityUnsupported, match="would not change the choice"):
            run_with_cache(model, PROMPT, points, steering=[Ablate(address)])
        assert not model.profile.support("router_logits").writable
        return
    assert name in WRITTEN
    plain = run_with_cache(model, PROMPT, points)
    unchosen = next(n for n in range(6) if n not in plain[points[2 + 1]][0, 4].tolist())
    with model.steer(Add(f"{address}.expert-{unchosen}", torch.tensor([50.0])), positions=[4]):
        changed = run_with_cache(model, PROMPT, points)
    x, logits, weights, chosen, out = (changed[point][0] for point in points)
    assert unchosen in chosen[4].tolist()
    assert float(logits[4, unchosen] - plain[address][0, 4, unchosen]) == pytest.approx(50.0, rel=1e-4)
    assert torch.equal(chosen[:4], plain[points[3]][0, :4])
    with torch.no_grad():
        assert difference(mixed(name, model, layer, x, weights, chosen), routed(name, model, layer, x, out)) < TIGHT
    assert difference(out[4], plain[points[4]][0, 4]) > 100 * TIGHT


def test_indices_are_only_read(family: tuple[str, InterpModel]) -> None:
    _, model = family
    with pytest.raises(CapabilityUnsupported, match="the router chooses"):
        run_with_cache(model, PROMPT, ["lm_head"], steering=[Ablate(f"expert_indices.{sparse(model)[0]}")])


def batch_with_a_write_in_row_1(model: InterpModel, rows: list[list[int]], points: list[str], write: Replace) -> Any:
    writes = writes_for([as_steering(model.profile, write)], len(rows[1]))
    reads = tuple(Read(address=model.address(point)) for point in points)
    requests = [
        ForwardRequest(token_ids=row, reads=reads, writes=writes if i == 1 else ()) for i, row in enumerate(rows)
    ]
    results = model.session.run(requests)
    return [{point: result.rows[model.address(point)] for point in points} for result in results]


def test_one_row_of_a_batch_leaves_the_others_alone(family: tuple[str, InterpModel]) -> None:
    """Bit for bit as far as the written layer; behind it, rows that share an expert share a matrix product.

    How a fused product rounds one token depends on how many others go to the same expert, which a write changes in
    later layers. With a product per token, which transformers has too, nothing of that is left.
    """
    name, model = family
    layer, rows = sparse(model)[0], [PROMPT, PROMPT[2:8], PROMPT[:3]]
    points = [*addresses(model, *POINTS, "mlp_out"), "lm_head"]
    write = Replace(f"expert_weights.{layer}", torch.arange(1.0, 1.0 + model.facts.layers[layer].top_k))
    plain, changed = run_with_cache(model, rows, points), batch_with_a_write_in_row_1(model, rows, points, write)
    for i, row in enumerate(rows):
        alone = run_with_cache(model, row, points, steering=[write] if i == 1 else None)
        for key in points:
            got = changed[i][key]
            assert difference(got.double(), alone[key][0].double()) < TIGHT, key
            here = key.endswith(f".{layer}")
            assert i == 1 or not here or torch.equal(got, plain[key][i, : len(row)]), key
    if name == "dbrx":
        return  # it has one implementation of its experts
    backend: Any = model.session.backend()
    backend.model.set_experts_implementation("batched_mm")
    try:
        plain, changed = run_with_cache(model, rows, points), batch_with_a_write_in_row_1(model, rows, points, write)
    finally:
        backend.model.set_experts_implementation("grouped_mm")
    for i in (0, 2):
        for key in points:
            assert torch.equal(changed[i][key], plain[key][i, : len(rows[i])]), key
    assert difference(changed[1]["lm_head"], plain["lm_head"][1, : len(rows[1])]) > 100 * TIGHT


def test_capture_while_generating_equals_one_forward(family: tuple[str, InterpModel]) -> None:
    _, model = family
    points = [*addresses(model, *POINTS, "mlp_out")]
    completion, grown = model.capture_generation(PROMPT, points, max_tokens=5, ignore_eos=True)
    once = run_with_cache(model, [*PROMPT, *completion.token_ids[:-1]], points)
    for key in points:
        assert grown[key].shape == once[key].shape, key
        assert difference(grown[key].double(), once[key].double()) < TIGHT, key


def test_experts_that_are_given_scaled_rows(folders: Path) -> None:
    """Llama 4: what a chosen expert reads is scaled, what it gives is not; so no weights are mixed with behind it."""
    with load_model(moe_families.save("llama4_text", folders), backend="eager", dtype="float32") as model:
        points = [f"{name}.2" for name in ("mlp_in", "router_logits", "expert_indices", "mlp_out")]
        x, logits, chosen, out = (run_with_cache(model, PROMPT, points)[point][0] for point in points)
        experts, scores = module(model, "mlp.experts", 2), logits.sigmoid().gather(-1, chosen)
        assert torch.equal(chosen, logits.topk(2).indices)

        def made(chosen: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            for row in range(len(x)):
                for expert, score in zip(chosen[row].tolist(), scores[row], strict=True):
                    total[row] += moe_families.expert("llama4_text", experts, expert, score * x[row])
            return total

        with torch.no_grad():
            want = routed("llama4_text", model, 2, x, out)
            assert difference(made(chosen), want) < TIGHT
            assert difference(made(chosen.flip(-1)), want) > 100 * TIGHT
        with pytest.raises(CapabilityUnsupported, match="multiplies what the chosen experts read"):
            run_with_cache(model, PROMPT, ["expert_weights.2"])
        with pytest.raises(CapabilityUnsupported, match="would not change the choice"):
            run_with_cache(model, PROMPT, ["lm_head"], steering=[Ablate("router_logits.2")])
