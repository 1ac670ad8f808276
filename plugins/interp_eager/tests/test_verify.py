"""``model.verify()`` on models that are sabotaged in one place: what is wrong is reported as failed, and named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from attrs import evolve
from tiny_families import PROMPT
from transformers import LlamaConfig, LlamaForCausalLM

from interp_core import Address, InterpModel, load_model
from interp_core.expressions import Binding, Derived, Read
from interp_core.trunk import Trunk
from interp_core.verdicts import FAILED, UNCHECKED
from interp_eager import taps

Change = Callable[[Address, Callable[[str], Binding]], Binding | None]


class Wrong(Trunk):
    """A conventional decoder's bindings, with one mistake."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def bind(self, address: Address, facts: Any, layout: Any) -> Binding:
        right = super().bind
        found = self.change(address, lambda name: right(evolve(address, name=name), facts, layout))
        return right(address, facts, layout) if found is None else found


def swapped(one: str, other: str) -> Change:
    """Two points that are taken for each other."""
    names = {one: other, other: one}
    return lambda address, at: at(names[address.name]) if address.name in names else None


def instead(name: str, binding: Binding) -> Change:
    """A point that is somewhere else."""
    return lambda address, at: binding if address.name == name else None


def other_heads(rows: torch.Tensor, place: Any) -> torch.Tensor:
    """``z`` of four heads of 16, in another order."""
    return rows.unflatten(-1, (4, 16))[..., [2, 0, 1, 3], :].flatten(-2)


@pytest.fixture(scope="module")
def loaded(folders: Path) -> Iterator[Callable[[str], InterpModel]]:
    """Tiny models by family, loaded once."""
    models: dict[str, InterpModel] = {}

    def get(name: str) -> InterpModel:
        if name not in models:
            models[name] = load_model(families.save(name, folders), backend="eager", dtype="float32").warmup()
        return models[name]

    yield get
    for model in models.values():
        model.shutdown()


SABOTAGED: list[tuple[str, Change, set[str], str]] = [
    ("llama", swapped("attn_out", "mlp_out"), {"attn_out", "mlp_out"}, "look first at attn_out (layers 0-3), mlp_out"),
    (
        "llama",
        swapped("attn_out_post", "mlp_out_post"),
        {"attn_out_post", "mlp_out_post"},
        "resid_mid - resid_pre is",
    ),
    ("llama", swapped("attn_in", "mlp_in"), {"attn_in", "mlp_in"}, "attn_in is resid_mid through an RMS norm: by the"),
    (
        "llama",
        swapped("mlp_pre", "mlp_pre_linear"),
        {"mlp_pre", "mlp_pre_linear"},
        "is silu(mlp_pre_linear) times",
    ),
    ("llama", swapped("resid_pre", "resid_mid"), {"resid_pre", "resid_mid"}, "is -1 times attn_out_post"),
    (
        "qwen3",
        swapped("q_norm_in", "q_norm_out"),
        {"q_norm_in", "q_norm_out"},
        "q_norm_in is q_norm_out through",
    ),
    (
        "llama",
        instead("attn_in", Binding(Read("block", "input"))),
        {"attn_in"},
        "attn_in is resid_pre as it is",
    ),
    (
        "gemma2",
        instead("attn_out_post", Binding(Read("attn"))),
        {"attn_out_post"},
        "attn_out_post is attn_out as it",
    ),
    (
        "granite",
        instead("attn_out_post", Binding(Read("attn"))),
        {"attn_out_post"},
        "resid_pre is 0.22 times",
    ),
    ("granite", instead("mlp_out_post", Binding(Read("mlp"))), {"mlp_out_post"}, "facts state the multiplier 0.22"),
    ("llama", instead("mlp_act", Binding(Read("mlp.gate_proj"))), {"mlp_act"}, ""),
    (
        "llama",
        instead("final_norm", Binding(Read("final_norm", "input"))),
        {"final_norm"},
        "is the last resid_post as it",
    ),
    ("llama", instead("z", Binding(Derived((Read("attn.o_proj", "input"),), other_heads))), {"z"}, "in another order"),
]


@pytest.mark.parametrize(("family", "change", "wrong", "hint"), SABOTAGED, ids=range(len(SABOTAGED)))
def test_a_wrong_binding_is_named(
    family: str, change: Change, wrong: set[str], hint: str, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family)
    monkeypatch.setattr(model.session.backend(), "trunk", Wrong(change))
    found = model.verify(PROMPT)
    assert not found.ok
    assert not found.complete
    assert wrong <= {name for name, state in found.points.items() if state == FAILED}
    assert {verdict.state for name in wrong for verdict in found.layers[name].values()} == {FAILED}
    assert not hint or any(hint in text for text in found.hints), found.hints
    # What has nothing to do with it is still proven.
    assert "proven" in found.points.values()


def test_a_layer_that_is_another_one_is_named_with_its_number(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    layout = model.session.backend().layout
    blocks = [dict(roles) for roles in layout.blocks]
    blocks[1]["attn.o_proj"], blocks[2]["attn.o_proj"] = blocks[2]["attn.o_proj"], blocks[1]["attn.o_proj"]
    monkeypatch.setattr(layout, "blocks", blocks)
    found = model.verify(PROMPT)
    assert {layer for layer, verdict in found.layers["attn_out"].items() if verdict.state == FAILED} == {1, 2}
    assert {layer for layer, verdict in found.layers["z"].items() if verdict.state == FAILED} == {1, 2}


def test_blocks_that_are_all_off_by_one_are_named(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the layers every identity holds: only the ends tell."""
    model = loaded("llama")
    layout = model.session.backend().layout
    monkeypatch.setattr(layout, "blocks", [*layout.blocks[1:], layout.blocks[0]])
    found = model.verify(PROMPT)
    assert {"embeddings", "resid_pre.0", "resid_post.3"} <= set(found.places(FAILED))
    assert any("resid_pre.3 is embeddings as it is: by the facts resid_pre.0 is" in text for text in found.hints)


def test_facts_that_state_too_little_are_told(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiplier and an order that the numbers show, and the facts do not say."""
    granite, cohere, llama = loaded("granite"), loaded("cohere"), loaded("llama")
    with_facts(monkeypatch, granite, residual_multiplier=1.0)
    told = granite.verify(PROMPT).hints
    assert any("resid_mid - resid_pre is 0.22 times attn_out_post" in text and "no multiplier" in text for text in told)
    layers = tuple(evolve(layer, parallel=True) for layer in llama.facts.layers)
    with_facts(monkeypatch, llama, layers=layers)
    told = llama.verify(PROMPT).hints
    assert any("so attention and MLP run one after the other, and not in parallel" in text for text in told)
    with_facts(monkeypatch, cohere, norm="rms")
    told = cohere.verify(PROMPT).hints
    assert any("attn_in is resid_pre through a layer norm: by the facts" in text for text in told)


def with_facts(monkeypatch: pytest.MonkeyPatch, model: InterpModel, **changed: Any) -> None:
    profile = evolve(model.profile, facts=evolve(model.facts, **changed))
    monkeypatch.setattr(model, "profile", profile)
    monkeypatch.setattr(model.session.backend(), "profile", profile)


def test_a_point_that_cannot_be_read_is_one_that_failed(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    layout = model.session.backend().layout
    blocks = [dict(roles) for roles in layout.blocks]
    del blocks[2]["mlp.down_proj"]
    monkeypatch.setattr(layout, "blocks", blocks)
    found = model.verify(PROMPT)
    assert found.places(FAILED) == ("mlp_act.2",)
    assert "can be read" in found.layers["mlp_act"][2].reason
    assert found.layers["mlp_act"][1].state == "proven"


def test_a_write_that_lands_elsewhere_is_named(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at one place, written at another: what was captured is right, and only a write can tell."""
    model = loaded("llama")
    wrong = Binding(Read("mlp", "input"), Read("attn", "input"))
    monkeypatch.setattr(model.session.backend(), "trunk", Wrong(instead("mlp_in", wrong)))
    found = model.verify(PROMPT)
    assert found.places(FAILED) == ("mlp_in.0",)
    assert "a write at mlp_in changes what lies behind it" in found.layers["mlp_in"][0].reason


def test_a_zero_write_that_changes_something_is_named(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    operated = taps.operated

    def careless(operation: Any, rows: torch.Tensor) -> torch.Tensor:
        return operated(operation, rows) + (1e-4 if operation.address.name == "z" else 0.0)

    monkeypatch.setattr(taps, "operated", careless)
    found = model.verify(PROMPT)
    assert {name for name, state in found.points.items() if state == FAILED} == {"z"}
    assert any(check.identity == "adding zero to z changes nothing" for check in found.failed())
    assert any(check.identity == "adding zero to value changes nothing" and check.holds for check in found.checks)


def test_gains_that_are_all_alike_are_proven_by_writes(tmp_path: Path) -> None:
    """Behind a norm whose gains are all 1, captured rows do not tell whether they are taken before the gain."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300)).save_pretrained(tmp_path)
    with load_model(tmp_path, backend="eager", dtype="float32") as model:
        found = model.verify(PROMPT)
    assert found.complete, (found.failed(), found.places(UNCHECKED))
    (proof,) = found.layers["attn_in"][1].checks
    assert proof.identity.startswith("with another prompt's attn_in in place")


def test_the_record_is_for_machines_and_the_text_for_people(loaded: Any) -> None:
    import json

    found = loaded("llama").verify(PROMPT)
    record = json.loads(json.dumps(found.describe()))
    assert record["complete"] is True
    assert record["points"]["z"] == "proven"
    assert record["layers"]["z"]["3"]["control"] > record["layers"]["z"]["3"]["error"]
    assert record["layers"]["q_norm_in"]["0"] == {
        "state": "absent",
        "reason": "this family has no query and key norms",
        "error": None,
        "control": None,
        "identities": [],
    }
    assert str(found).startswith("27 points: 19 proven, 8 absent, 0 failed, 0 unchecked")


@pytest.mark.real_model
def test_every_point_of_the_real_model_is_proven_in_under_a_minute(smollm: InterpModel) -> None:
    smollm.warmup()
    start = time.process_time()
    found = smollm.verify()
    assert time.process_time() - start < 60
    assert found.complete
    for spec in smollm.points():
        states = {verdict.state for verdict in found.layers[spec.name].values()}
        assert states == (
            {"proven"} if smollm.supports(f"{spec.name}.0" if spec.scope == "layer" else spec.name) else {"absent"}
        )
