"""Least squares on captured tensors: right explanations are found, and what explains nothing is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interp_core.checks import Check, apart
from interp_core.fits import fit_combination, fit_factor, fit_gain, normalised
from interp_core.verdicts import Verdict, Verification, listed_layers


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (9, 16)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_factor() -> None:
    x = rows(0)
    factor, error = fit_factor(x, 0.22 * x)
    assert factor == pytest.approx(0.22)
    assert error < 1e-12
    assert fit_factor(x, rows(1))[1] > 0.1
    assert fit_factor(x, rows(1, 9, 4))[1] == float("inf")


def test_the_fewest_parts_are_found() -> None:
    a, b, c = rows(0), rows(1), rows(2)
    parts = {"a": a, "b": b, "same as a": a.clone(), "c": c, "narrow": rows(3, 9, 4)}
    assert fit_combination(0.5 * a, parts, 1e-9) == pytest.approx({"a": 0.5})
    assert fit_combination(a - 2 * c, parts, 1e-9) == pytest.approx({"a": 1.0, "c": -2.0})
    assert fit_combination(a + b + c, parts, 1e-9) == {}
    assert fit_combination(a + b + c, parts, 1e-9, most=3) == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})
    assert fit_combination(rows(7), parts, 1e-9) == {}


@pytest.mark.parametrize("centred", [False, True])
def test_gains(centred: bool) -> None:
    x, gain, bias = rows(0), 1 + 0.3 * rows(5)[0], rows(6)[0] if centred else 0.0
    normal = normalised(x, 1e-6, centred=centred)
    error, spread = fit_gain(normal, normal * gain + bias, centred=centred)
    assert error < 1e-9
    assert spread > 0.1
    assert fit_gain(normal, normal, centred=centred)[1] < 1e-9
    assert fit_gain(normal.roll(1, -1), normal * gain + bias, centred=centred)[0] > 0.1


def test_apart_knows_masked_entries() -> None:
    x = torch.tensor([0.0, float("-inf"), 2.0])
    assert apart(x, x.clone()) == 0.0
    assert apart(torch.tensor([0.0, float("-inf"), 2.2]), x) == pytest.approx(0.1)
    assert apart(torch.tensor([0.0, 1.0, 2.0]), x) == float("inf")


def check(error: float, control: float | None, tolerance: float = 2e-5) -> Check:
    return Check(identity="it is", layer=3, proves=("z",), error=error, control=control, tolerance=tolerance)


def test_what_holds_what_fails_and_what_says_nothing() -> None:
    for made, (holds, fails, proof), word in (
        (check(1e-7, 0.5), (True, False, True), "holds"),
        (check(1e-3, 0.5), (False, True, False), "fails"),
        (check(float("nan"), 0.5), (False, True, False), "fails"),
        (check(1e-7, 1e-5), (False, False, False), "says nothing"),
        (check(1e-7, None), (True, False, False), "holds"),
    ):
        assert (made.holds, made.fails, made.proof) == (holds, fails, proof)
        assert f"'it is' at layer 3 {word}: error" in made.describe()


def test_the_state_of_a_point_is_its_worst() -> None:
    layers = {0: Verdict(state="proven"), 1: Verdict(state="absent", reason="none"), 2: Verdict(state="unchecked")}
    found = Verification(checks=[check(1e-7, 0.5)], layers={"z": layers, "lm_head": {None: Verdict(state="proven")}})
    assert found.points == {"z": "unchecked", "lm_head": "proven"}
    assert (found.ok, found.complete) == (True, False)
    assert found.places("unchecked") == ("z.2",)
    assert found.places("proven") == ("z.0", "lm_head")
    assert str(found).splitlines() == [
        "2 points: 1 proven, 0 absent, 0 failed, 1 unchecked; 1 identities",
        "unchecked: z",
    ]


def test_layers_in_few_words() -> None:
    assert listed_layers([3, 0, 1, 2, 7]) == "layers 0-3, 7"
    assert listed_layers([4]) == "layer 4"
    assert listed_layers([4, 6]) == "layers 4, 6"
