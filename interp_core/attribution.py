"""Attribution in one backward pass: how much a metric depends on each captured value, to first order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from interp_core.address import Address
from interp_core.cache import Cache
from interp_core.errors import RequestError
from interp_core.functions import run_with_cache
from interp_core.logits import finished
from interp_core.metrics import read_metric

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = ["Attribution", "attribute"]


@frozen(kw_only=True, eq=False)
class Attribution:
    """How a metric depends on points. All caches hold the points that were asked for, in the same shapes.

    Attributes:
        metric: the metric of each prompt, ``[batch]``.
        activations: the values, as in ``run_with_cache``.
        gradients: of the sum of the metrics over the batch, by each value: what a write there would change.
        scores: ``gradients * activations``; with a baseline ``gradients * (baseline - activations)``, which is to
            first order how the metric changes where the baseline's value is put in place of this one.
    """

    metric: Tensor
    activations: Cache
    gradients: Cache
    scores: Cache

    def total(self, point: object) -> Tensor:
        """Scores of one point summed over its last axis: per position, and per head where it has heads."""
        return self.scores[point].sum(-1)


def attribute(
    model: InterpModel,
    tokens: Any,
    points: Sequence[Any],
    metric: Any,
    *,
    baseline: Any = None,
    attention_mask: Any = None,
    steering: Any = None,
) -> Attribution:
    """Gradient times activation, or attribution patching where a baseline is given, in one forward and backward.

    Args:
        model: loaded with ``requires_grad=True``.
        tokens: as :func:`run_with_cache`.
        points: addresses with one row per position; ranges and coordinates as always.
        metric: a token (id or text), a pair of tokens, or a callable from logits ``[pos, vocab]`` to one number.
        baseline: a cache of the same points and shapes, or prompts of the same lengths that are run for them: what
            would be put in place of the values.
        attention_mask: as :func:`run_with_cache`.
        steering: operations for this call, baseline included.

    Raises:
        AddressError, CapabilityUnsupported: a point does not exist, is not served, or gradients do not flow.
        RequestError: nothing depends on a point, the metric is not one, or the baseline does not fit.
    """
    import torch

    judge = read_metric(model, metric)
    asked = model.profile.addresses(points)
    if not asked:
        raise RequestError("attribution of no points: name some")
    _require_rows(model, asked)
    wanted = [*asked, Address("lm_head")]
    options: dict[str, Any] = {"attention_mask": attention_mask, "steering": steering}
    with torch.enable_grad():
        cache = run_with_cache(model, tokens, wanted, detach=False, **options)
        logits = finished(cache["lm_head"].float(), model.facts)
        spans = list(zip(cache.offsets, cache.lengths, strict=True))
        values = torch.stack([judge(logits[i, first : first + n]) for i, (first, n) in enumerate(spans)])
        found = torch.autograd.grad(values.sum(), [cache[a] for a in asked], allow_unused=True)
    unused = [str(a) for a, gradient in zip(asked, found, strict=True) if gradient is None]
    if unused:
        raise RequestError(f"the metric does not depend on {', '.join(unused)}, or not in one differentiable step")
    activations = _like(cache, {a: cache[a].detach() for a in asked})
    gradients = _like(cache, {a: g for a, g in zip(asked, found, strict=True) if g is not None})
    other = None if baseline is None else _baseline(model, baseline, asked, activations, options)
    scores = {a: gradients[a] * (activations[a] if other is None else other[a] - activations[a]) for a in asked}
    return Attribution(
        metric=values.detach(), activations=activations, gradients=gradients, scores=_like(cache, scores)
    )


def _require_rows(model: InterpModel, addresses: Sequence[Address]) -> None:
    for address in addresses:
        spec = model.profile.specs.get(address.name)
        if spec is None or not spec.positional or spec.integer:
            raise RequestError(f"{address} has no row of real numbers per position to attribute to")


def _like(cache: Cache, tensors: dict[Address, Tensor]) -> Cache:
    return Cache(tensors, cache.tokens, cache.lengths, cache.offsets, cache.positions, model_id=cache.model_id)


def _baseline(
    model: InterpModel, given: Any, addresses: Sequence[Address], activations: Cache, options: dict[str, Any]
) -> Cache:
    """The baseline's values.

    Raises:
        RequestError: prompts of other lengths, or a cache of other shapes.
    """
    found = given if isinstance(given, Cache) else run_with_cache(model, given, addresses, **options)
    if found.lengths != activations.lengths:
        raise RequestError(
            f"the baseline has prompts of {list(found.lengths)} tokens, and this run of {list(activations.lengths)}: "
            "values are compared position by position"
        )
    for address in addresses:
        if address not in found or found[address].shape != activations[address].shape:
            raise RequestError(f"the baseline holds no {address} of shape {list(activations[address].shape)}")
    return found
