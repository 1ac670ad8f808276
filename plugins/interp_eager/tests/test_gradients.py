"""Gradients at points are what writes there would change: every writable point against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save
from tiny_families import PROMPT

from interp_core import Add, Cache, CapabilityUnsupported, InterpModel, RequestError, load_model, run_with_cache

_FAMILIES = (
    "llama", "gpt2", "gemma2", "granite", "cohere", "gpt_neox", "olmo2", "phi3", "falcon-new", "opt", "exaone4",
)  # fmt: skip
_OTHER = [8, 31, 200, 77, 3, 14]
# Norms compute in float32 whatever the weights are, so a smaller step drowns in rounding.
_STEP = 1e-2


@pytest.fixture(params=_FAMILIES)
def model(request: pytest.FixtureRequest, folders: Path) -> Any:
    """A tiny model whose weights require gradients, in float64."""
    assert request.param in FAMILIES
    folder = save(request.param, folders)
    with load_model(folder, "eager", dtype="float64", requires_grad=True) as loaded:
        yield loaded


def weighed(logits: torch.Tensor) -> torch.Tensor:
    """Some number that depends on all logits, and not linearly."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    return (weights * logits).sum() + (weights * logits**2).sum() / 10


def writable(model: InterpModel) -> list[str]:
    """Every address that can be written, in two layers."""
    found = []
    for spec in model.points():
        for layer in [""] if spec.scope == "trunk" else [".1", f".{model.n_layers - 1}"]:
            if model.refusal(spec.name + layer, write=True) is None and spec.positional:
                found.append(spec.name + layer)
    return found


def value(model: InterpModel, prompts: Any, operations: list[Any], positions: Any = None) -> float:
    cache = run_with_cache(
        model, prompts, ["lm_head"], steering=model_steering(model, operations, positions), detach=True
    )
    return float(weighed(cache["lm_head"]))


def slope(function: Callable[[float], float], size: float = 1.0) -> float:
    """Its derivative at zero, by central differences of two steps of some ``size``: exact to the fourth order."""
    near, far = ((function(h) - function(-h)) / (2 * h) for h in (_STEP * size, 2 * _STEP * size))
    return (4 * near - far) / 3


def model_steering(model: InterpModel, operations: list[Any], positions: Any) -> Any:
    from interp_core.steering import as_steering

    return as_steering(model.profile, operations, positions=positions)


def test_a_gradient_is_what_a_write_changes(model: InterpModel) -> None:
    """At one position: what is the same at all of them can cancel, as in keys without rotation."""
    wrong, control = {}, 0
    points = writable(model)
    cache = run_with_cache(model, PROMPT, [*points, "lm_head"], detach=False)
    gradients = torch.autograd.grad(weighed(cache["lm_head"]), [cache[p] for p in points])
    for point, gradient in zip(points, gradients, strict=True):
        direction = torch.randn(gradient.shape[2:], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        direction = direction / direction.norm()
        predicted = float((gradient[:, 4] * direction).sum())

        def moved(scale: float, point: str = point, direction: torch.Tensor = direction) -> float:
            return value(model, PROMPT, [Add(point, direction, scale=scale)], [4])

        found = slope(moved, float(cache[point][:, 4].detach().norm()))
        tolerance = 2e-2 * max(abs(found), 1e-1)
        if abs(found - predicted) > tolerance or found == 0.0:
            wrong[point] = (found, predicted)
        control += abs(found - float((gradient[:, 5] * direction).sum())) < tolerance
    assert wrong == {}
    assert control < len(points) / 3, "the gradient at another position is another one"
    assert len(points) >= 20


def test_reading_in_the_graph_changes_no_number(model: InterpModel) -> None:
    points = [*writable(model), "lm_head"]
    for prompts in (PROMPT, [PROMPT, PROMPT[::-1]]):
        plain = run_with_cache(model, prompts, points)
        graph = run_with_cache(model, prompts, points, detach=False)
        assert [p for p in points if not torch.equal(plain[p], graph[p].detach())] == []


def test_gradients_by_position_coordinate_and_unequal_prompts(folders: Path) -> None:
    with load_model(save("llama", folders), "eager", dtype="float64", requires_grad=True) as model:
        prompts = [PROMPT, _OTHER]
        points = ["z.1.head-2", "resid_mid.2", "mlp_act.3.neuron-7", "value.0", "resid_post.1"]
        whole = run_with_cache(model, prompts, [*points, "lm_head"], detach=False)
        at_all = torch.autograd.grad(weighed(whole["lm_head"]), [whole[p] for p in points])
        for point, gradient in zip(points, at_all, strict=True):
            assert gradient.shape == whole[point].shape
            assert not gradient[1, len(_OTHER) :].any(), "padding has no part in it"
            assert gradient[1, : len(_OTHER)].any()
        some = run_with_cache(model, prompts, points, detach=False, positions=[2, 5])
        # Logits of all positions, from a second point of the same forward: the last block's own output.
        end = run_with_cache(model, prompts, [*points, "final_norm"], detach=False, positions=[2, 5])
        for point in points:
            assert some[point].shape[1] == 2
            (gradient,) = torch.autograd.grad(end["final_norm"].square().sum(), end[point], retain_graph=True)
            assert gradient.shape == end[point].shape
            assert gradient.any()
        point = "z.1.head-2"
        (gradient,) = torch.autograd.grad(end["final_norm"].square().sum(), end[point])
        direction = torch.linspace(-1, 1, 16, dtype=torch.float64)

        def squared(scale: float) -> float:
            steering = model_steering(model, [Add(point, direction, scale=scale)], [5])
            return float(
                run_with_cache(model, prompts, ["final_norm"], positions=[2, 5], steering=steering)["final_norm"]
                .square()
                .sum()
            )

        found = slope(squared)
        predicted = float((gradient[:, 1] * direction).sum())
        assert abs(found - predicted) < 1e-2 * abs(found)


def test_gradients_reach_parameters_and_earlier_points(folders: Path) -> None:
    with load_model(save("gemma2", folders), "eager", dtype="float64", requires_grad=True) as model:
        cache = run_with_cache(model, PROMPT, ["resid_post.0", "resid_mid.1", "resid_post.2"], detach=False)
        weight = model.session.backend().model.model.layers[1].mlp.down_proj.weight
        early, mid, late = (cache[p] for p in ("resid_post.0", "resid_mid.1", "resid_post.2"))
        by_weight, by_early, by_mid = torch.autograd.grad(late.square().sum(), [weight, early, mid])
        assert all(g.any() for g in (by_weight, by_early, by_mid))
        # The skip connection carries most of it: a gradient through the sublayer alone would be another one.
        assert by_mid.norm() > by_mid.new_tensor(0.5) * by_early.norm()


def test_without_gradients_it_is_refused_before_a_forward(llama: InterpModel) -> None:
    with pytest.raises(CapabilityUnsupported, match="requires_grad=True"):
        run_with_cache(llama, PROMPT, ["resid_post.1"], detach=False)


def test_inference_mode_is_refused(folders: Path) -> None:
    with (
        load_model(save("llama", folders), "eager", requires_grad=True) as model,
        torch.inference_mode(),
        pytest.raises(RequestError, match="inference_mode"),
    ):
        run_with_cache(model, PROMPT, ["resid_post.1"], detach=False)


def test_a_cache_is_cut_from_the_graph_by_default(folders: Path) -> None:
    with load_model(save("llama", folders), "eager", requires_grad=True) as model:
        cache: Cache = run_with_cache(model, PROMPT, ["resid_post.1", "z.1"])
        assert not any(t.requires_grad for t in cache.values())
