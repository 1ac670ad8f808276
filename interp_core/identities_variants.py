"""Identities of parts that families make in one of a few ways: routers, attention gates, collapsed streams.

The variant that holds proves the points; if none holds, nothing is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from interp_core.checks import Check, Get, difference
from interp_core.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["variant_identities"]


def variant_identities(facts: ModelFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """For each router, gate and collapse of which the facts say nothing: the variant that fits best."""
    for layer in facts.layers:
        at = layer.index
        routers = [] if facts.routing.scores else _router(get, at, tolerance, facts.routed_scale)
        gates = [] if facts.attn_gate else _gate(get, at, tolerance)
        for found in (routers, gates):
            if found:
                yield min(found, key=lambda check: check.error)
        for site, stack in (("attn", "resid_pre"), ("mlp", "resid_mid")):
            collapse, streams = get(f"{site}_stream_collapse", at), get(stack, at)
            if collapse is not None and streams is not None and streams.dim() == 3:
                yield _collapse(site, at, collapse, streams, tolerance)


def _scores() -> dict[str, Callable[[Tensor], Tensor]]:
    import torch

    return {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "square root of softplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }


def _router(get: Get, layer: int, tolerance: float, scale: float) -> list[Check]:
    """Weights are the scores of the chosen experts, as they are or as shares of their sum, times a factor."""
    logits, weights, indices = (get(n, layer) for n in ("router_logits", "expert_weights", "expert_indices"))
    if logits is None or weights is None or indices is None:
        return []
    chosen, wide = indices.long(), weights.double()
    checks = []
    for name, score in _scores().items():
        scores = score(logits.double())
        for shares in (False, True):
            picked, wrong = (s.gather(-1, chosen) for s in (scores, scores.roll(1, -1)))
            if shares:
                picked, wrong = picked / picked.sum(-1, keepdim=True), wrong / wrong.sum(-1, keepdim=True)
            checks.append(
                Check(
                    identity=f"expert_weights are the {name} of router_logits at expert_indices"
                    + (", as shares of their sum" if shares else ""),
                    layer=layer,
                    proves=("router_logits", "expert_weights", "expert_indices"),
                    error=min(difference(picked * factor, wide) for factor in {1.0, scale}),
                    control=min(difference(wrong * factor, wide) for factor in {1.0, scale}),
                    tolerance=tolerance,
                )
            )
    return checks


_GATES: Final = ("sigmoid", "silu")


def _gate(get: Get, layer: int, tolerance: float) -> list[Check]:
    """``z`` is what attention sums up, times an activation of the gate."""
    import torch

    probs, value, z, gate = (get(name, layer) for name in ("attn_probs", "value", "z", "attn_gate"))
    if probs is None or value is None or z is None or gate is None or gate.numel() != z.numel():
        return []
    group = probs.shape[0] // value.shape[1]
    summed = (probs.to(value.dtype) @ value.repeat_interleave(group, dim=1).transpose(0, 1)).transpose(0, 1)
    functions: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}
    return [
        Check(
            identity=f"attn_probs @ value, times the {name} of attn_gate, is z",
            layer=layer,
            proves=("attn_gate", "attn_probs", "value", "z"),
            error=difference(summed * functions[name](gate).reshape(summed.shape), z),
            control=difference(summed, z),
            tolerance=tolerance,
        )
        for name in _GATES
    ]


def _collapse(site: str, layer: int, collapse: Tensor, streams: Tensor, tolerance: float) -> Check:
    """A collapse is some weighted sum of the streams, the weights fitted at each position."""
    import torch

    stack, wanted = streams.double().transpose(1, 2), collapse.double().unsqueeze(-1)

    def made(target: Tensor) -> Tensor:
        weights: Tensor = torch.linalg.lstsq(stack, target).solution
        return (stack @ weights).squeeze(-1)

    turned = wanted.roll(1, 1)
    return Check(
        identity=f"{site}_stream_collapse is a weighted sum of the streams",
        layer=layer,
        proves=(f"{site}_stream_collapse",),
        error=difference(made(wanted), wanted.squeeze(-1)),
        control=difference(made(turned), turned.squeeze(-1)),
        tolerance=tolerance,
    )
