"""Attention matrices rebuilt from a layer's queries and keys, with the terms that its kernel applies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interp_core.errors import BackendUnavailable
from interp_core.facts import LayerFacts, ModelFacts

__all__ = ["check_terms", "rebuilt"]


def check_terms(terms: Mapping[str, Any], layer: LayerFacts, facts: ModelFacts) -> None:
    """What vLLM's kernel applies, against what the family does: a difference means other numbers, silently.

    Raises:
        BackendUnavailable: they differ; the message says in what.
    """
    stated = (layer.attn_scale, facts.attn_scale, layer.head_dim**-0.5)
    scale = next(value for value in stated if value is not None)
    expected = {"window": layer.window, "softcap": facts.attn_softcap, "sinks": facts.sinks and not layer.sinkless}
    found = {"window": terms["window"], "softcap": terms["softcap"], "sinks": terms["sinks"] is not None}
    differing = [f"{name} {found[name]} for {expected[name]}" for name in expected if found[name] != expected[name]]
    if abs(terms["scale"] - scale) > 1e-6 * scale:
        differing.append(f"scale {terms['scale']:g} for {scale:g}")
    if (facts.positions == "alibi") != (terms["alibi"] is not None):
        differing.append("position biases (ALiBi) that one of the two has and the other lacks")
    if differing:
        raise BackendUnavailable(
            f"vLLM would run layer {layer.index} of this {facts.model_type} with another attention than its "
            f"configuration says: {'; '.join(differing)}. Use backend='eager'"
        )


def rebuilt(query: Tensor, key: Tensor, positions: Tensor, layer: LayerFacts, terms: Mapping[str, Any], sinks: Any,
            slopes: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores and probabilities ``[heads, query, key]``, float32.

    Args:
        query: ``[queries, heads * head_dim]``, rotated.
        key: ``[keys, kv_heads * head_dim]``, rotated, from position 0 on.
        positions: absolute position of each query.
        layer: the layer's facts.
        terms: scale, softcap and window of the kernel.
        sinks: ``[heads]`` logits of attention sinks, or ``None``.
        slopes: ``[heads]`` slopes of ALiBi, or ``None``.
    """
    q = query.float().unflatten(-1, (layer.n_heads, -1))
    # Query head h reads key head h // group: repeat each key head, do not tile them.
    k = key.float().unflatten(-1, (layer.n_kv_heads, -1)).repeat_interleave(layer.n_heads // layer.n_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * terms["scale"]
    if terms["softcap"] is not None:
        scores = torch.tanh(scores / terms["softcap"]) * terms["softcap"]
    back = positions[:, None] - torch.arange(k.shape[0], device=scores.device)
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * back
    hidden = back < 0
    if terms["window"] is not None:
        hidden = hidden | (back >= terms["window"])
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores, scores.softmax(-1)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return scores, torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
