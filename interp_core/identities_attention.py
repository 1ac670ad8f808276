"""Identities of softmax attention on captured tensors: scores, probabilities, mask, sinks, values and ``z``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get, difference
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.identities_sub_norms import sub_normed_attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention_identities"]


def attention_identities(facts: ModelFacts, layer: LayerFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """Scores to probabilities, the mask, and probabilities to ``z``, of one layer."""
    at = layer.index
    scores, probs = get("attn_scores", at), get("attn_probs", at)
    if scores is not None and probs is not None:
        yield from _softmax(layer, scores, probs, tolerance, sinks=facts.sinks and not layer.sinkless)
    if facts.attn_sub_norm or facts.attn_difference:
        yield from sub_normed_attention(facts, layer, get, tolerance)
        return
    if facts.shared_key_value:
        yield from _turned_back(at, get, tolerance)
        return
    value, z, gate = get("value", at), get("z", at), get("attn_gate", at)
    gated = facts.attn_gate in ("packed", "separate")
    if probs is None or value is None or z is None or (gated and gate is None):
        return
    if gate is not None and not gated:
        return  # Of gates that no family has there are several kinds: see variant_identities.
    group = layer.n_heads // layer.n_kv_heads
    per_head = value.repeat_interleave(group, dim=1).transpose(0, 1)
    probs = probs.to(value.dtype)
    summed = (probs @ per_head).transpose(0, 1)
    how, factor = _gate(facts, gate, summed, z)
    yield Check(
        identity=f"attn_probs @ value{how} is z",
        layer=at,
        proves=("attn_probs", "value", "z", *(("attn_gate",) if gated else ())),
        error=difference(summed * factor, z),
        control=difference(_wrong_heads(layer, probs, value, per_head).transpose(0, 1) * factor, z),
        tolerance=tolerance,
    )


def _turned_back(at: int, get: Get, tolerance: float) -> Iterator[Check]:
    """Where the rotated key is the value: ``z`` is what attention sums up, turned back by the query's own rotation.

    One rotation for all heads of a query leaves the products between its heads as they are. Only queries that attend to
    nothing but tokens are looked at: entries that stand for several have no values here.
    """
    probs, value, z, key = (get(name, at) for name in ("attn_probs", "value", "z", "k_norm_out"))
    if probs is None or value is None or z is None or key is None:
        return
    tokens = value.shape[0]
    plain = (probs[..., tokens:] == 0).flatten(2).all(-1).all(0)
    if int(plain.sum()) < 2:
        return

    def products(heads: Tensor) -> Tensor:
        return heads.double() @ heads.double().transpose(-1, -2)

    def summed(rows: Tensor) -> Tensor:
        return (probs[..., :tokens].to(rows.dtype) @ rows.transpose(0, 1)).transpose(0, 1)[plain]

    yield Check(
        identity="attn_probs @ value, turned by one rotation per query, is z",
        layer=at,
        proves=("value",),
        error=difference(products(summed(value)), products(z[plain])),
        control=difference(products(summed(key)), products(z[plain])),
        tolerance=tolerance,
        concerns=("attn_probs", "z"),
    )


def _gate(facts: ModelFacts, gate: Tensor | None, summed: Tensor, z: Tensor) -> tuple[str, Tensor | float]:
    """How the sum over values is gated, in words, and the factor on it (``[query, heads, v_head_dim]``, or less)."""
    import torch.nn.functional as F

    if facts.attn_gate == "per_head":
        fitted = (summed * z).sum(-1, keepdim=True) / summed.square().sum(-1, keepdim=True)
        return ", times one number per head,", fitted
    if gate is None:
        return "", 1.0
    activation = {"sigmoid": F.sigmoid, "softplus": F.softplus}[facts.attn_gate_activation]
    return f", times the {facts.attn_gate_activation} of attn_gate,", activation(gate)


def _wrong_heads(layer: LayerFacts, probs: Tensor, value: Tensor, per_head: Tensor) -> Tensor:
    """What heads would sum up with values of others: key/value heads tiled instead of repeated, where that differs."""
    if layer.n_heads == 1:
        return probs @ per_head.roll(1, 1)
    if layer.n_kv_heads == 1:
        return probs.roll(1, 0) @ per_head
    if layer.n_kv_heads < layer.n_heads:
        return probs @ value.repeat(1, layer.n_heads // layer.n_kv_heads, 1).transpose(0, 1)
    return probs @ per_head.roll(1, 0)


def _one_sink(layer: LayerFacts, scores: Tensor, probs: Tensor, tolerance: float) -> Check:
    """What a row lacks of 1 is the share of one logit per head, the same for every query."""
    mass = probs.double().sum(-1)
    # Each head's sink is best seen in the row that it shares most evenly with the keys.
    clearest = (mass - 0.5).abs().argmin(-1, keepdim=True)

    def predicted(values: Tensor) -> Tensor:
        total = values.double().logsumexp(-1)
        sink = (total - (mass / (1.0 - mass)).log()).gather(-1, clearest)
        return (total - sink).sigmoid()

    return Check(
        identity="what attn_probs lack of 1 is one sink logit per head over attn_scores",
        layer=layer.index,
        proves=("attn_scores", "attn_probs"),
        error=difference(predicted(scores), mass),
        control=difference(predicted(scores - scores.amax(-1, keepdim=True)), mass),
        tolerance=tolerance,
    )


def _softmax(layer: LayerFacts, scores: Tensor, probs: Tensor, tolerance: float, *, sinks: bool) -> Iterator[Check]:
    import torch

    # With a sink logit in the denominator a row of probabilities sums to less than 1.
    mass = probs.double().sum(-1, keepdim=True) if sinks else 1.0
    made = scores.double().softmax(-1) * mass
    wrong = scores.roll(1, -1).double().softmax(-1) * mass
    yield Check(
        identity="the softmax of attn_scores is attn_probs",
        layer=layer.index,
        proves=("attn_scores", "attn_probs"),
        error=difference(made, probs),
        control=difference(wrong, probs) if scores.shape[-1] > 1 else None,
        tolerance=tolerance,
    )
    if sinks:
        yield _one_sink(layer, scores, probs, tolerance)
    queries, columns = probs.shape[-2:]
    # Which compressed entries are seen behind the tokens is the model's choice.
    keys = columns if layer.compress_rate is None else queries
    # A probability may be too small for its dtype, and its key is seen all the same.
    least = torch.log(torch.tensor(torch.finfo(probs.dtype).tiny, dtype=torch.float64))
    tiny = torch.isfinite(scores) & (scores.double() - scores.double().amax(-1, keepdim=True) < least)
    above = ((probs > 0) | tiny)[..., :keys]
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]
    every, earlier = torch.ones_like(distance, dtype=torch.bool), distance >= 0
    allowed, wrong_mask = (earlier, every) if layer.causal else (every, earlier)
    if layer.window is not None and layer.mixer == "chunked_attention":
        # Chunks, not windows: a query sees its own chunk as far as itself.
        chunk = torch.arange(max(keys, queries)) // layer.window
        allowed = allowed & (chunk[-queries:, None] == chunk[None, :keys])
    elif layer.window is not None:
        allowed = allowed & (distance.abs() < layer.window)
    if layer.key_budget is not None:
        yield _chosen_keys(layer, above, allowed)
        return
    seen = above.any(0) if above.dim() == 3 else above
    yield Check(
        identity="exactly the keys of the mask (and window) have a probability above 0",
        layer=layer.index,
        proves=("attn_probs",),
        error=float((seen != allowed).double().mean()),
        control=float((seen != wrong_mask).double().mean()) if queries > 1 else None,
        tolerance=0.0,
    )


def _chosen_keys(layer: LayerFacts, seen: Tensor, allowed: Tensor) -> Check:
    """Where a query attends to some of the keys that it may see: which ones is the model's choice, how many is not.

    Keys are chosen in blocks; of a chosen block, a query attends to all that it may see. Those behind the last full
    block it may see beside its choice, where the layer's facts say so.
    """
    import torch
    import torch.nn.functional as F

    short = -allowed.shape[-1] % layer.key_block

    def blocks(keys: Tensor) -> Tensor:
        whole: Tensor = F.pad(keys.float(), (0, short)).unflatten(-1, (-1, layer.key_block)).amax(-1)
        return whole > 0

    visible = allowed.sum(-1)
    full, left = visible // layer.key_block, visible % layer.key_block
    tail = allowed & (torch.arange(allowed.shape[-1]) >= (visible - left)[..., None])
    if layer.key_tail:
        many = full.clamp(max=layer.key_budget) + (left > 0)
    else:
        many, tail = blocks(allowed).sum(-1).clamp(max=layer.key_budget), torch.zeros_like(tail)

    def wrong(keys: Tensor) -> float:
        chosen = blocks(keys)
        whole = chosen.repeat_interleave(layer.key_block, dim=-1)[..., : allowed.shape[-1]] & allowed
        missed = (keys != whole) | (tail & ~keys)
        return float(missed.double().mean() + (chosen.sum(-1) != many).double().mean())

    return Check(
        identity="as many keys as a query chooses, and none that it may not see, have a probability above 0",
        layer=layer.index,
        proves=("attn_probs",),
        error=wrong(seen),
        control=wrong(seen.roll(1, -1)),
        tolerance=0.0,
    )
