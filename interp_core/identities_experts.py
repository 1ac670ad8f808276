"""Identities of a mixture of experts on captured tensors alone: what its weights and its choice have to do with logits.

They need to know how the family makes one of the other, which :mod:`interp_core.routing` says; where it says nothing,
nothing is yielded. That the chosen experts, so weighted, are the block's output takes the experts' own weights, and is
no affair of captured tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get, difference
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.routing import Routing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["expert_identities", "expert_weights_of"]


def expert_identities(facts: ModelFacts, layer: LayerFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """Both identities of one layer, as far as its points are captured and its family's routing is known."""
    logits, weights, indices = (get(n, layer.index) for n in ("router_logits", "expert_weights", "expert_indices"))
    if logits is None or indices is None:
        return
    if weights is not None and facts.routing.scores:
        yield _weights(facts.routing, layer, logits, weights, indices, tolerance)
    if facts.routing.ranked:
        yield _choice(layer, logits, indices)


def expert_weights_of(routing: Routing, logits: Tensor, indices: Tensor) -> Tensor:
    """The weights ``[..., top_k]`` of chosen experts, from the logits ``[..., experts]``, in float64.

    Raises:
        ValueError: it is not known how this family makes weights of logits.
    """
    if routing.scores not in ("softmax", "sigmoid", "in turn") or routing.learned:
        raise ValueError("how this family makes weights of logits is not known")
    return _made(routing, logits, indices)


def _made(routing: Routing, logits: Tensor, indices: Tensor) -> Tensor:
    """The weights, but for what the checkpoint has learned of them."""
    if routing.scores == "in turn":
        picked = _in_turn(logits, indices, routing.nearness)
    else:
        wide = logits.double()
        scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
        picked = scores.gather(-1, indices)
    if routing.shares:
        picked = picked / picked.sum(-1, keepdim=True)
    return picked * (routing.scale * routing.factor)


def _in_turn(logits: Tensor, indices: Tensor, nearness: float) -> Tensor:
    """Each choice's share of those that are left and near enough to the largest of them."""
    import torch

    left, found = logits, []
    for index in indices.split(1, dim=-1):
        largest = left.amax(-1, keepdim=True)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * nearness
        found.append(left.masked_fill(far, float("-inf")).double().softmax(-1).gather(-1, index))
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(found, dim=-1)


def _weights(
    routing: Routing, layer: LayerFacts, logits: Tensor, weights: Tensor, indices: Tensor, tolerance: float
) -> Check:
    # One expert that gets all of it has the same weight whichever it is.
    certain = layer.top_k == 1 and routing.shares
    other = (indices + 1) % layer.n_experts
    right, wrong = (_fitted(routing, _made(routing, logits, i), weights, indices) for i in (indices, other))
    if routing.learned == "token":
        weights = weights.double() / weights.double().sum(-1, keepdim=True)
    return Check(
        identity=f"expert_weights are the {routing.scores} of router_logits at expert_indices, as the model scales it",
        layer=layer.index,
        proves=("expert_weights",) if certain else ("router_logits", "expert_weights", "expert_indices"),
        error=difference(right, weights),
        control=None if certain else difference(wrong, weights),
        tolerance=tolerance,
    )


def _fitted(routing: Routing, made: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Weights with what the checkpoint has learned of them: the mean of what it is for each expert, or shares alone."""
    if routing.learned == "token":
        return made / made.sum(-1, keepdim=True)
    if routing.learned == "expert":
        ratios, chosen = (weights.double() / made).flatten(), indices.flatten()
        factors = made.new_zeros(int(chosen.max()) + 1).scatter_reduce(0, chosen, ratios, "mean", include_self=False)
        return made * factors[indices]
    return made


def _choice(layer: LayerFacts, logits: Tensor, indices: Tensor) -> Check:
    chosen = logits.gather(-1, indices).sort(-1).values
    largest = logits.sort(-1).values
    return Check(
        identity="expert_indices are the experts with the largest router_logits",
        layer=layer.index,
        proves=("router_logits", "expert_indices"),
        error=float((chosen != largest[..., -layer.top_k :]).double().mean()),
        # With every expert chosen the smallest are the largest.
        control=float((chosen != largest[..., : layer.top_k]).double().mean())
        if layer.top_k < layer.n_experts
        else None,
        tolerance=0.0,
    )
