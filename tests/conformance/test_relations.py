"""The kit's own identities on made-up tensors: the right ones hold, and each likely mistake fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from interp_core.checks import Check
from interp_core.facts import ModelFacts
from interp_core.identities_norms import collapse_identities, norm_identities
from interp_core.identities_variants import variant_identities
from interp_core.points import GENERAL_POINTS
from interp_core.testing.reasons import made_up_facts
from interp_core.testing.records import AXES

TOLERANCE = 1e-9
POSITIONS = 9


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(POSITIONS, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def get(captured: Mapping[str, Tensor]) -> Callable[[str, int | None], Tensor | None]:
    return lambda name, layer: captured.get(name) if layer in (None, 0) else None


def facts(**changed: Any) -> ModelFacts:
    return evolve(made_up_facts(1), **{"attn_pre_norm": True, "mlp_pre_norm": True, "norm": "rms", **changed})


def only(checks: Iterator[Check]) -> Check:
    (found,) = checks
    return found


def rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


GAIN = 1 + 0.2 * rows(32, seed=5)[0]


def normed(x: Tensor, about: ModelFacts) -> Tensor:
    if about.norm == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=about.norm_eps) * GAIN + 0.3 * GAIN.roll(1)
    return rms(x, about.norm_eps) * GAIN


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_what_stands_behind_a_norm(norm: str) -> None:
    about = facts(norm=norm)
    before = rows(32) * torch.linspace(0.5, 3.0, POSITIONS, dtype=torch.float64)[:, None]
    right = normed(before, about)
    wrong = {
        "before the norm": before,
        "before the gain": right / GAIN if norm == "rms" else (right - 0.3 * GAIN.roll(1)) / GAIN,
        "another channel": right.roll(1, -1),
        "another position": right.roll(1, 0),
    }
    assert only(norm_identities(about, get({"resid_pre": before, "attn_in": right}), TOLERANCE)).holds
    for what, value in wrong.items():
        check = only(norm_identities(about, get({"resid_pre": before, "attn_in": value}), TOLERANCE))
        assert not check.proof, what


def test_a_norm_without_a_gain_is_named_by_the_facts() -> None:
    about, before = facts(qk_norm="head"), rows(4, 8)
    captured = {"q_norm_in": before, "q_norm_out": rms(before, about.norm_eps)}
    check = only(norm_identities(about, get(captured), TOLERANCE))
    assert (check.holds, check.proof) == (True, False)
    named = evolve(about, gainless=("q_norm_out",))
    assert only(norm_identities(named, get(captured), TOLERANCE)).proof


def test_where_there_is_no_norm_nothing_changes() -> None:
    captured = {"resid_pre": rows(32), "attn_in": rows(32)}
    about = facts(attn_pre_norm=False)
    assert only(norm_identities(about, get(captured), TOLERANCE)).holds
    assert not only(norm_identities(about, get(captured | {"attn_in": rows(32, seed=1)}), TOLERANCE)).holds


@pytest.mark.parametrize("score", [lambda x: x.softmax(-1), torch.sigmoid])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_routers(score: Callable[[Tensor], Tensor], shares: bool, scale: float) -> None:
    logits = rows(4)
    scores, chosen = score(logits), logits.topk(2, dim=-1).indices
    weights = scores.gather(-1, chosen)
    weights = scale * (weights / weights.sum(-1, keepdim=True) if shares else weights)
    right = {"router_logits": logits, "expert_weights": weights, "expert_indices": chosen}
    about = facts(routed_scale=scale)
    assert only(variant_identities(about, get(right), TOLERANCE)).holds
    for name, value in (("expert_weights", weights.flip(-1)), ("expert_indices", (chosen + 1) % 4)):
        assert not only(variant_identities(about, get(right | {name: value}), TOLERANCE)).holds
    twice = right | {"expert_weights": 2.0 * weights}
    assert not only(variant_identities(about, get(twice), TOLERANCE)).holds


@pytest.mark.parametrize("activation", [torch.sigmoid, torch.nn.functional.silu])
def test_attention_gates(activation: Callable[[Tensor], Tensor]) -> None:
    probs = torch.randn(4, POSITIONS, POSITIONS, dtype=torch.float64).softmax(-1)
    value, gate = rows(2, 8), rows(4, 8, seed=3)
    summed = (probs @ value.repeat_interleave(2, dim=1).transpose(0, 1)).transpose(0, 1)
    right = {"attn_probs": probs, "value": value, "attn_gate": gate, "z": summed * activation(gate)}
    assert only(variant_identities(facts(), get(right), TOLERANCE)).holds
    assert not only(variant_identities(facts(), get(right | {"attn_gate": gate.roll(1, 1)}), TOLERANCE)).holds


def test_collapsed_streams() -> None:
    about = evolve(facts(), n_streams=4)
    streams, shares = rows(4, 32), rows(4, 1, seed=2)
    collapse = (streams * shares).sum(1)
    right = {"resid_pre": streams, "attn_stream_collapse": collapse, "attn_in": normed(collapse, about)}
    assert only(variant_identities(about, get(right), TOLERANCE)).holds
    assert only(collapse_identities(about, get(right), TOLERANCE)).holds
    as_it_is = right | {"attn_in": collapse}
    assert only(collapse_identities(about, get(as_it_is), TOLERANCE)).holds
    wrong = right | {"attn_stream_collapse": normed(collapse, about)}
    assert not only(variant_identities(about, get(wrong), TOLERANCE)).holds
    assert not only(collapse_identities(about, get(right | {"attn_in": collapse.roll(1, 0)}), TOLERANCE)).holds


def test_every_axis_has_a_size() -> None:
    about = made_up_facts(4)
    assert {axis for axis in AXES if about.axis_size(axis, 0) == 0} == {"query", "key"}
    assert {axis for spec in GENERAL_POINTS.values() for axis in spec.axes} <= AXES
