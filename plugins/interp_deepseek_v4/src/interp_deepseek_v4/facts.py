"""What the configurations of these trunks say in words of their own, as facts."""

from __future__ import annotations

from typing import Any, Final

import attrs

from interp_core.facts import LayerFacts, ModelFacts
from interp_core.facts_config import trunk_of
from interp_core.residual import ResidualBasis

__all__ = [
    "alternating",
    "basis",
    "deepseek_v4",
    "gated_latent",
    "pooled_choice",
    "several_streams",
    "without_final_norm",
]

_ADDED: Final = (
    "this layer adds features of n-grams to its streams before attention reads them, so no matrix takes the one stack "
    "to the other"
)

_COMPRESSED: Final = ("compressed_sparse_attention", "heavily_compressed_attention")


def deepseek_v4(config: Any, facts: ModelFacts) -> ModelFacts:
    """DeepSeek-V4: every layer slides, and some see compressed entries beside; the first layers are hash-routed."""
    rates = getattr(config, "compress_rates", None) or {}
    kinds = list(getattr(config, "mlp_layer_types", None) or ())
    layers = [_layer(layer, config.sliding_window, rates) for layer in facts.layers]
    return attrs.evolve(
        several_streams(config, facts),
        layers=layers,
        qk_norm="head",
        gainless=("q_norm_out",),
        sinks=True,
        shared_key_value=True,
        extra={
            **facts.extra,
            "hash_routed_layers": [i for i, kind in enumerate(kinds) if kind == "hash_moe"],
            "left_padding": "changes results, so batches are padded on the right",
        },
    )


def _layer(layer: LayerFacts, window: int | None, rates: dict[str, int]) -> LayerFacts:
    rate = int(rates[layer.mixer]) if layer.mixer in _COMPRESSED else None
    return attrs.evolve(layer, window=window, compress_rate=rate)


def several_streams(config: Any, facts: ModelFacts) -> ModelFacts:
    """A trunk whose blocks this package knows."""
    del config  # The core has read the number of streams already.
    return attrs.evolve(facts, structure_known=True)


def gated_latent(config: Any, facts: ModelFacts) -> ModelFacts:
    """HY-V4: latent attention with sinks, and a gate on what its heads give."""
    trunk, _ = trunk_of(config)
    layers = [attrs.evolve(layer, key_budget=int(trunk.index_topk)) for layer in facts.layers]
    return attrs.evolve(several_streams(config, facts), layers=layers, sinks=True, attn_gate="separate")


def pooled_choice(config: Any, facts: ModelFacts) -> ModelFacts:
    """GLM-5 Next: attention to keys that are chosen in pools, and to those behind the last pool."""
    trunk, _ = trunk_of(config)
    pool = int(trunk.index_kpool)
    choice: dict[str, Any] = {"key_budget": int(trunk.index_topk) // pool, "key_block": pool}
    choice["key_tail"] = bool(trunk.index_kpool_always_select_tail)
    layers = [attrs.evolve(layer, **choice) if layer.softmax else layer for layer in facts.layers]
    return attrs.evolve(several_streams(config, facts), layers=layers)


def without_final_norm(config: Any, facts: ModelFacts) -> ModelFacts:
    """A trunk whose contraction holds the last norm; some of its blocks add features of n-grams to all streams."""
    trunk, _ = trunk_of(config)  # A wrapper states them in its text model's configuration.
    added = [int(number) - 1 for number in getattr(trunk, "ple_layer_ids", None) or ()]
    layers = [
        attrs.evolve(layer, absent={**layer.absent, "attn_stream_mix": _ADDED}) if layer.index in added else layer
        for layer in facts.layers
    ]
    block = int(trunk.indexer_compress_ratio)
    choice: dict[str, Any] = {"key_budget": int(trunk.indexer_budget) // block, "key_block": block, "key_tail": True}
    layers = [attrs.evolve(layer, **choice) if layer.softmax else layer for layer in layers]
    # The norms, too, are inside the connections: sublayers read what was collapsed as it is.
    return attrs.evolve(
        several_streams(config, facts),
        layers=layers,
        qk_norm="head",
        attn_gate="packed",
        final_norm=False,
        attn_pre_norm=False,
        mlp_pre_norm=False,
        extra={**facts.extra, "stream_additions": added},
    )


def alternating(config: Any, facts: ModelFacts) -> ModelFacts:
    """AltUp: both sublayers of a block work on one stream, the active one."""
    trunk, _ = trunk_of(config)
    active = getattr(trunk, "altup_active_idx", 0)
    sparse = list(getattr(trunk, "activation_sparsity_pattern", None) or ())
    layers = [
        attrs.evolve(layer, gate_sparsity=float(share))
        for layer, share in zip(facts.layers, sparse or [0.0] * len(facts.layers), strict=True)
    ]
    return attrs.evolve(
        several_streams(config, facts),
        layers=layers,
        qk_norm="head",
        extra={**facts.extra, "active_stream": int(active)},
    )


def basis(facts: ModelFacts) -> ResidualBasis:
    """Several streams that every block mixes: no row of one of them is what the unembedding reads."""
    return ResidualBasis(
        n_streams=facts.n_streams,
        additive=False,
        sequential=True,
        lens_valid=False,
        blockers=(
            f"the trunk carries {facts.n_streams} residual streams",
            "every block writes to all of them with weights of its own, so contributions do not add up",
            "the unembedding reads a learned contraction of the streams, not any one of them",
        ),
        instead=(
            "name a reduction of the streams: logit_lens(..., reduction='head') for the model's own contraction, or "
            "'mean', 'sum', or the number of one stream"
        ),
    )
