"""Gates on what attention sums up: packed into the query projection, or a projection of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_families
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from checks import TIGHT, module
from tiny_families import PROMPT, write
from torch import Tensor

from interp_core import Add, Apply, CapabilityUnsupported, InterpModel, load_model, run_with_cache
from interp_core.checks import difference
from interp_core.identities import capture_identities
from interp_core.verify import verify

GATED = {"afmoe": torch.sigmoid, "laguna": F.softplus, "qwen3_next": torch.sigmoid, "qwen3_5_moe_text": torch.sigmoid}
SEPARATE = ("afmoe", "laguna")
POINTS = ("attn_gate", "attn_probs", "value", "z")


@pytest.fixture(scope="module", params=sorted(GATED))
def gated(request: pytest.FixtureRequest, folders: Path) -> Iterator[tuple[str, InterpModel]]:
    """One tiny model of each family that gates, float32, with the family's name."""
    with load_model(moe_families.save(request.param, folders), backend="eager", dtype="float32") as model:
        yield request.param, model


def softmax_layers(model: InterpModel) -> list[int]:
    return [layer.index for layer in model.facts.layers if layer.softmax]


def test_identity_4_with_the_gate(gated: tuple[str, InterpModel]) -> None:
    name, model = gated
    assert softmax_layers(model)
    for i in softmax_layers(model):
        cache = run_with_cache(model, PROMPT, [f"{point}.{i}" for point in POINTS])
        gate, probs, value, z = (cache[f"{point}.{i}"][0] for point in POINTS)
        layer = model.facts.layers[i]
        assert gate.shape == (len(PROMPT), layer.n_heads, layer.head_dim)
        summed = torch.einsum("hqk,khd->qhd", probs, value.repeat_interleave(layer.n_heads // layer.n_kv_heads, 1))
        assert difference(summed * GATED[name](gate), z) < TIGHT
        # Controls: no gate, the gate as it is, another head's, and another half of each head's numbers.
        for wrong in (1.0, gate, GATED[name](gate.roll(1, 1)), GATED[name](gate.roll(layer.head_dim // 2, -1))):
            assert difference(summed * wrong, z) > 100 * TIGHT


def test_the_identity_on_captured_tensors_knows_the_gate(gated: tuple[str, InterpModel]) -> None:
    _, model = gated
    for i in softmax_layers(model):
        cache = run_with_cache(model, PROMPT, [f"{point}.{i}" for point in POINTS])

        def get(name: str, layer: int | None, cache: Any = cache) -> Tensor | None:
            address = name if layer is None else f"{name}.{layer}"
            return cache[address][0] if address in cache else None

        checks = [c for c in capture_identities(model.facts, get, TIGHT) if c.identity.startswith("attn_probs @ value")]
        assert [(c.layer, "attn_gate" in c.proves) for c in checks] == [(i, True)]
        assert checks[0].holds
        assert checks[0].control is not None

        def swapped(name: str, layer: int | None, get: Any = get) -> Tensor | None:
            found: Tensor | None = get(name, layer)
            return found.roll(1, 1) if name == "attn_gate" and found is not None else found

        assert not any(
            c.holds for c in capture_identities(model.facts, swapped, TIGHT) if c.identity.startswith("attn_probs @ v")
        )


def test_identity_10_bare_hooks(gated: tuple[str, InterpModel]) -> None:
    name, model = gated
    for i in softmax_layers(model):
        seen: list[Tensor] = []
        role = "attn.gate_proj" if name in SEPARATE else "attn.q_proj"
        handle = module(model, role, i).register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out.clone()))
        try:
            gate = run_with_cache(model, PROMPT, [f"attn_gate.{i}"])[f"attn_gate.{i}"][0]
        finally:
            handle.remove()
        layer = model.facts.layers[i]
        want = seen[0][0]
        if name not in SEPARATE:
            want = want.unflatten(-1, (layer.n_heads, 2 * layer.head_dim))[..., layer.head_dim :]
        assert torch.equal(gate.flatten(1), want.flatten(1))


def test_identity_8_writes(gated: tuple[str, InterpModel]) -> None:
    _, model = gated
    i = softmax_layers(model)[-1]
    others = [h for h in range(model.facts.layers[i].n_heads) if h != 1]
    layer, ends = model.facts.layers[i], [f"z.{i}", "lm_head"]
    plain = run_with_cache(model, PROMPT, [*ends, f"attn_gate.{i}", f"attn_probs.{i}"])
    vector = torch.linspace(-3, 5, layer.n_heads * layer.head_dim)
    same = run_with_cache(model, PROMPT, ends, steering=[Add(f"attn_gate.{i}", 0 * vector)])
    assert all(torch.equal(same[key], plain[key]) for key in ends)
    with model.steer(Add(f"attn_gate.{i}.head-1", torch.full((layer.head_dim,), 3.0)), positions=[4]):
        changed = run_with_cache(model, PROMPT, list(plain))
    gate = f"attn_gate.{i}"
    assert difference(changed[gate][0, 4, 1], plain[gate][0, 4, 1] + 3.0) < TIGHT
    assert torch.equal(changed[gate][0, 4, others], plain[gate][0, 4, others])
    # The query half of the same projection is not touched.
    assert torch.equal(changed[f"attn_probs.{i}"], plain[f"attn_probs.{i}"])
    assert torch.equal(changed[ends[0]][0, 4, others], plain[ends[0]][0, 4, others])
    assert difference(changed[ends[0]][0, 4, 1], plain[ends[0]][0, 4, 1]) > 100 * TIGHT
    assert torch.equal(changed[ends[1]][0, :4], plain[ends[1]][0, :4])
    assert difference(changed[ends[1]][0, 4], plain[ends[1]][0, 4]) > 10 * TIGHT


def test_capture_while_generating_equals_one_forward(gated: tuple[str, InterpModel]) -> None:
    _, model = gated
    points = [f"attn_gate.{i}" for i in softmax_layers(model)]
    completion, grown = model.capture_generation(PROMPT, points, max_tokens=5, ignore_eos=True)
    once = run_with_cache(model, [*PROMPT, *completion.token_ids[:-1]], points)
    assert all(difference(grown[key], once[key]) < TIGHT for key in points)


def test_a_family_without_gates_says_so(llama: InterpModel) -> None:
    with pytest.raises(CapabilityUnsupported, match="does not gate"):
        run_with_cache(llama, PROMPT, ["attn_gate.0"])


def test_one_number_per_head_is_no_gate_of_this_shape(folders: Path) -> None:
    def config() -> hf.LagunaConfig:
        made: hf.LagunaConfig = moe_families.FAMILIES["laguna"]()
        made.gating = True
        return made

    with load_model(write(config, folders / "laguna-per_head"), backend="eager", dtype="float32") as model:
        with pytest.raises(CapabilityUnsupported, match="gates each head by one number"):
            run_with_cache(model, PROMPT, ["attn_gate.0"])
        points = ["path.model.layers.1.self_attn.g_proj", "attn_probs.1", "value.1", "z.1"]
        gate, probs, value, z = (run_with_cache(model, PROMPT, points)[point][0] for point in points)
        summed = torch.einsum("hqk,khd->qhd", probs, value)
        assert difference(summed * F.softplus(gate)[..., None], z) < TIGHT
        assert difference(summed, z) > 100 * TIGHT
        found = [check for check in verify(model, PROMPT).checks if check.identity.startswith("attn_probs @ value")]
        assert [check.holds for check in found] == [True] * model.n_layers


def test_sinks_that_come_as_a_factor_are_in_the_probabilities(folders: Path) -> None:
    """Granite with windows takes the softmax over the keys alone, and multiplies what a row sums up by their share."""
    with load_model(moe_families.save("granitemoe_swa", folders), backend="eager", dtype="float32") as model:
        points = ["attn_scores.1", "attn_probs.1", "value.1", "z.1"]
        plain = run_with_cache(model, PROMPT, points)
        scores, probs, value, z = (plain[point][0] for point in points)
        values = value.repeat_interleave(2, dim=1)
        assert difference(torch.einsum("hqk,khd->qhd", probs, values), z) < TIGHT
        assert difference(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), z) > 100 * TIGHT
        with model.steer(Apply("attn_probs.1", lambda rows: 0.5 * rows), positions=[4]):
            changed = run_with_cache(model, PROMPT, points)
        assert torch.equal(changed["z.1"][0, :4], z[:4])
        assert difference(changed["attn_probs.1"][0, :, 4], 0.5 * probs[:, 4]) < TIGHT
        assert difference(changed["z.1"][0, 4], 0.5 * z[4]) < TIGHT
