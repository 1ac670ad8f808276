"""The run over all architectures: it finds what is wrong on purpose, and its page says what it found."""

from __future__ import annotations

from typing import Any

import conformance
import pytest
import torch
from attrs import evolve

from interp_core import Add, families
from zoo import prove as proving
from zoo.build import build, names
from zoo.outcome import Outcome
from zoo.page import current, parse, render
from zoo.prove import prove

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def wrong_row(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that changes the facts of a family for the time of a test."""

    def change(family: str, **values: Any) -> None:
        rows = {**families.FAMILIES, family: evolve(families.FAMILIES[family], **values)}
        monkeypatch.setattr("interp_core.facts_reader.FAMILIES", rows)

    return change


def test_a_plain_family_is_proven() -> None:
    found = prove("llama")
    assert (found.kind, found.problems, found.doubts) == ("proven", (), ())
    assert set("".join(found.marks.values())) == {"P", "-"}
    assert found.marks["resid_mid"] == "P"
    assert found.marks["q_norm_in"] == "-"


@pytest.mark.parametrize("family", ["marian", "mllama", "zamba2", "zaya"])
def test_what_is_true_of_odd_families_is_not_called_wrong(family: str) -> None:
    """A key that no query looks at; blocks passed over without an image; an MLP before its mixer; learned weights."""
    found = prove(family)
    assert (found.kind, found.problems) == ("proven", ())


@pytest.mark.parametrize(
    ("family", "values", "failing"),
    [
        ("llama", {"parallel": True}, "mlp_in"),
        ("gemma2", {"final_softcap": False}, "logits"),
        ("cohere2", {"logit_multiplier_keys": ()}, "logits"),
        ("gemma2", {"windows": "none"}, "keys"),
    ],
)
def test_a_wrong_fact_is_found(wrong_row: Any, family: str, values: dict[str, Any], failing: str) -> None:
    wrong_row(family, **values)
    found = prove(family)
    assert found.kind in ("failed", "error")
    assert any(failing in problem for problem in found.problems), found.problems


def test_a_family_without_a_row_is_unknown_and_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interp_core.facts_reader.FAMILIES", {})
    found = prove("llama")
    assert found.kind == "unknown"
    assert not found.marks


def test_writes_of_zero_that_change_a_bit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "Add", lambda address, vector: Add(address, vector + 1e-3))
    found = prove("llama")
    assert found.kind == "failed"
    assert any("a zero write changes bits" in problem for problem in found.problems)


def test_large_writes_that_change_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "Add", lambda address, vector: Add(address, 0.0 * vector))
    found = prove("llama")
    assert any("a large write leaves lm_head as it was" in problem for problem in found.problems)


def test_large_writes_at_other_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_STEERED", [2])
    found = prove("llama")
    assert any("changes lm_head before it" in problem for problem in found.problems)


def test_what_builds_may_not_be_listed_as_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "UNBUILDABLE", {"llama": "it is said"})
    assert any("listed" in problem for problem in prove("llama").problems)


def test_what_does_not_build_must_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "UNBUILDABLE", {})
    found = prove("gemma4_assistant")
    assert found.kind == "not built"
    assert any("not listed" in problem for problem in found.problems)


def test_every_causal_architecture_of_transformers_is_in_the_zoo() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(names())
    assert sum(name.startswith("mm:") for name in names()) > 80


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "deepseek_v4"])
def test_nothing_in_a_tiny_model_is_left_at_a_constant(name: str) -> None:
    model = build(name)
    kept = model.state_dict()
    for key, tensor in kept.items():
        if tensor.numel() > 1:
            assert not bool((tensor == tensor.flatten()[0]).all()), key
    again = build(name).state_dict()
    assert all(torch.equal(kept[key], again[key]) for key in kept)


_PROVEN = Outcome(
    name="a",
    kind="proven",
    marks={"embeddings": "P", "value": "-P", "resid_post": "P", "resid_streams": "P"},
    reasons={"it has none": ["value (0)", "z"], "nor this; or that": ["attn_gate"]},
)
_REFUSED = Outcome(name="mm:b", kind="refused", reasons={"'b' is an encoder: it, too, ends": ["every point"]})
_BARE = Outcome(name="c", kind="not built", reasons={"too big": ["every point"]})


def test_the_page_reads_back_as_it_was_written() -> None:
    page = render([_PROVEN, _REFUSED, _BARE])
    assert parse(page) == {"a": _PROVEN, "mm:b": _REFUSED, "c": _BARE}
    assert current(page, [evolve(_PROVEN, doubts=("not on the page",)), _REFUSED]) == []


@pytest.mark.parametrize(
    "fresh",
    [
        evolve(_PROVEN, kind="failed"),
        evolve(_PROVEN, marks={**_PROVEN.marks, "embeddings": "F"}),
        evolve(_PROVEN, reasons={"it has none": ["value (0)"], "nor this; or that": ["attn_gate"]}),
        evolve(_PROVEN, name="new"),
    ],
)
def test_a_page_that_says_something_else_is_stale(fresh: Outcome) -> None:
    assert current(render([_PROVEN, _REFUSED]), [fresh, _REFUSED]) == [fresh.name]


@pytest.mark.parametrize(("kind", "status"), [("proven", 0), ("failed", 1), ("not proven", 1), ("error", 1)])
def test_the_exit_status_says_whether_all_is_proven(monkeypatch: pytest.MonkeyPatch, kind: str, status: int) -> None:
    monkeypatch.setattr(conformance, "_run", lambda names, jobs: [evolve(_PROVEN, kind=kind)])
    assert conformance.main(["llama"]) == status


def test_fewer_proven_architectures_than_promised_fail_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(conformance, "PAGE", tmp_path / "coverage.md")
    many = [evolve(_PROVEN, name=f"n{i}") for i in range(150)]
    monkeypatch.setattr(conformance, "_run", lambda names, jobs: many)
    assert conformance.main([]) == 0
    assert conformance.main(["--check"]) == 0
    monkeypatch.setattr(conformance, "_run", lambda names, jobs: many[1:])
    assert conformance.main(["--check"]) == 1
    assert conformance.main([]) == 1
    # One whose blocks serve nothing does not count.
    bare = evolve(_PROVEN, name="bare", marks={**_PROVEN.marks, "resid_post": "-"})
    monkeypatch.setattr(conformance, "_run", lambda names, jobs: [*many[1:], bare])
    assert conformance.main([]) == 1
