"""The identities that prove points right, on captured tensors alone, each with a control that must fail.

They hold for any backend: nothing here looks at a module. An identity whose parts a model does not have is
simply not yielded; what proves a point, and what does not, is :mod:`interp_core.verify`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get, difference
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.identities_attention import attention_identities
from interp_core.identities_experts import expert_identities
from interp_core.identities_streams import stream_identities
from interp_core.identities_sub_norms import sub_normed_neurons
from interp_core.identities_sum_norms import sum_norm_identities, unfitted
from interp_core.identities_sums import per_channel, sum_identities

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["activations", "capture_identities"]


def capture_identities(facts: ModelFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """All identities that the captured tensors allow, layer by layer."""
    yield from _start(facts, get, tolerance)
    for layer in facts.layers:
        yield from _chain(facts, layer, get)
        if facts.norm_on_sum:
            yield from sum_norm_identities(facts, layer, get, tolerance)
        else:
            yield from sum_identities(facts, layer, get, tolerance)
        yield from _neurons(facts, layer, get, tolerance)
        yield from attention_identities(facts, layer, get, tolerance)
        yield from expert_identities(facts, layer, get, tolerance)
    if facts.n_streams > 1:
        yield from stream_identities(facts, get, tolerance)


def _start(facts: ModelFacts, get: Get, tolerance: float) -> Iterator[Check]:
    embeddings, first = get("embeddings", None), get("resid_pre", 0)
    if embeddings is None or first is None or facts.positions in ("learned", "other") or facts.embedding_types:
        return
    if facts.n_streams > 1:
        # Copies, or projections of the first one: the first stream begins as the embeddings everywhere.
        first = first[:, 0]
    if facts.embedding_learned:
        yield Check(
            identity="embeddings, times one weight per channel and plus one bias, are resid_pre.0",
            layer=None,
            proves=("embeddings",),
            error=difference(per_channel(embeddings, first), first),
            control=difference(per_channel(embeddings.roll(1, 0), first), first),
            tolerance=tolerance,
        )
        return
    factor = 1.0 if facts.embedding_scale_inside else facts.embedding_scale

    def error(rows: Tensor) -> float:
        return unfitted(facts, rows, first) if facts.embedding_norm else difference(rows, first)

    yield Check(
        identity="embeddings, scaled as the family scales them outside the module, are resid_pre.0"
        + (", normalised" if facts.embedding_norm else ""),
        layer=None,
        proves=("embeddings", "resid_pre.0"),
        error=error(embeddings * factor),
        control=error(embeddings.roll(1, 0) * factor) if embeddings.shape[0] > 1 else None,
        tolerance=tolerance,
    )


def _chain(facts: ModelFacts, layer: LayerFacts, get: Get) -> Iterator[Check]:
    post, following = get("resid_post", layer.index), None
    if layer.index + 1 < facts.n_layers:
        following = get("resid_pre", layer.index + 1)
    before = get("resid_pre", layer.index)
    if post is None or following is None or before is None:
        return
    halved = facts.halved_after(layer.index)
    post = 0.5 * post if halved else post
    yield Check(
        identity=f"resid_post{', halved,' if halved else ''} is the next layer's resid_pre",
        layer=layer.index,
        proves=("resid_post", f"resid_pre.{layer.index + 1}"),
        error=difference(following, post),
        control=difference(before, post),
        tolerance=0.0,  # one tensor, twice: equal in any precision
    )


def _neurons(facts: ModelFacts, layer: LayerFacts, get: Get, tolerance: float) -> Iterator[Check]:
    gate, act = get("mlp_pre", layer.index), get("mlp_act", layer.index)
    function = activations().get(facts.activation)
    if gate is None or act is None or function is None:
        return
    gate = cut_off(gate, layer.gate_sparsity)
    linear = get("mlp_pre_linear", layer.index)
    value = function(gate) if linear is None else function(gate) * linear
    wrong = gate if linear is None else function(linear) * gate
    normed = facts.mlp_sub_norm
    yield Check(
        identity=f"act(mlp_pre) (times mlp_pre_linear){', normalised,' if normed else ''} is mlp_act",
        layer=layer.index,
        proves=("mlp_pre", "mlp_act", *(() if linear is None else ("mlp_pre_linear",))),
        error=sub_normed_neurons(facts, value, act) if normed else difference(value, act),
        control=sub_normed_neurons(facts, wrong, act) if normed else difference(wrong, act),
        tolerance=tolerance,
    )


def cut_off(gate: Tensor, sparsity: float) -> Tensor:
    """A gate less the value that a share of its neurons stays below, were they normally distributed; not below 0."""
    if not sparsity:
        return gate
    deviations = NormalDist().inv_cdf(sparsity)
    return (gate - gate.mean(-1, keepdim=True) - deviations * gate.std(-1, keepdim=True, correction=0)).relu()


def activations() -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Activation functions by the names that configurations use."""
    import torch.nn.functional as F

    def tanh_gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    return {
        "silu": F.silu,
        "swish": F.silu,
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "gelu": F.gelu,
        "gelu_new": tanh_gelu,
        "gelu_fast": tanh_gelu,
        "gelu_pytorch_tanh": tanh_gelu,
    }
