"""Identities of sublayers that normalise what they made before their last projection, and of differential attention.

What is summed up over values, or the product of the branches of an MLP, is not yet the input of the projection: a norm
stands between, whose gain is fitted over the positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.fits import fit_factor, fit_gain, normalised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sub_normed_attention", "sub_normed_neurons"]


def sub_normed_attention(facts: ModelFacts, layer: LayerFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """What attention sums up, or the difference of its two halves, normalised, is ``z``."""
    probs, value, z = (get(name, layer.index) for name in ("attn_probs", "value", "z"))
    if probs is None or value is None or z is None:
        return
    what, unfitted = "attn_probs @ value", _unfitted_sum
    if facts.attn_difference:
        what, unfitted = "the difference of two halves of attn_probs @ value", _unfitted_difference
    yield Check(
        identity=f"{what}, normalised, is z",
        layer=layer.index,
        proves=("attn_probs", "value", "z"),
        error=unfitted(facts, probs.double(), value.double(), z.double()),
        control=unfitted(facts, probs.double(), value.double().roll(1, 0), z.double()),
        tolerance=tolerance,
    )


def sub_normed_neurons(facts: ModelFacts, product: Tensor, act: Tensor) -> float:
    """How far the product of the branches of an MLP, normalised, is from ``mlp_act``."""
    return _unfitted(facts, product.double(), act.double())


def _unfitted(facts: ModelFacts, x: Tensor, y: Tensor) -> float:
    centred = facts.norm == "layer"
    return fit_gain(normalised(x, facts.norm_eps, centred=centred), y, centred=centred)[0]


def _unfitted_sum(facts: ModelFacts, probs: Tensor, value: Tensor, z: Tensor) -> float:
    summed = _summed(probs, value)
    return _unfitted(facts, summed.flatten(1), z.flatten(1))


def _summed(probs: Tensor, value: Tensor) -> Tensor:
    """``[pos, heads, v_head_dim]``."""
    per_head = value.repeat_interleave(probs.shape[0] // value.shape[1], dim=1).transpose(0, 1)
    return (probs @ per_head).transpose(0, 1)


def _unfitted_difference(facts: ModelFacts, probs: Tensor, value: Tensor, z: Tensor) -> float:
    """Each head sums up both halves of the value heads; half of the heads less the others, times a number, is ``z``.

    The norm has no gain, and one factor is left.
    """
    import torch

    halves = [half.repeat(1, 2, 1) for half in value.chunk(2, dim=1)]
    first, second = torch.cat([_summed(probs, half) for half in halves], dim=-1).chunk(2, dim=1)
    wanted = z.reshape(first.shape)
    # At each position and head z is a multiple of first - number * second, which two dot products tell.
    parts = torch.stack([first, second], dim=-1)
    shares = torch.linalg.lstsq(parts, wanted.unsqueeze(-1)).solution[..., 0]
    number = (-shares[..., 1] / shares[..., 0]).median()
    return fit_factor(normalised(first - number * second, facts.norm_eps, centred=False), wanted)[1]
