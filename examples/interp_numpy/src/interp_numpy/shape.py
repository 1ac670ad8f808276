"""Which models are of Llama's shape: said from the facts of a configuration, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interp_core import ModelFacts

__all__ = ["why_not"]

# What the code of a family does beside its facts (the order of a rotation, fused projections) is known for these.
_FAMILIES: Final = ("llama", "mistral", "qwen2")

_TRUNK: Final[Mapping[str, Any]] = {
    "structure_known": True,
    "text_path": "",
    "quantization": None,
    "n_streams": 1,
    "norm": "rms",
    "attn_pre_norm": True,
    "attn_post_norm": False,
    "mlp_pre_norm": True,
    "mlp_post_norm": False,
    "final_norm": True,
    "qk_norm": "",
    "gated_mlp": True,
    "activation": "silu",
    "positions": "rotary",
    "embedding_scale": 1.0,
    "residual_multiplier": 1.0,
    "logit_multiplier": 1.0,
    "attn_scale": None,
    "attn_softcap": None,
    "final_softcap": None,
    "sinks": False,
    "attn_gate": "",
    "unknown_attention": (),
    "latent_attention": False,
    "shared_key_value": False,
}
_LAYER: Final[Mapping[str, Any]] = {
    "mixer": "full_attention",
    "window": None,
    "kv_shared_from": None,
    "compress_rate": None,
    "mlp": "dense",
    "parallel": False,
}


def why_not(facts: ModelFacts) -> str:
    """Why this backend cannot run a model, or nothing if it can."""
    found = [_said(name, facts, want) for name, want in _TRUNK.items()]
    for layer in facts.layers:
        found += [_said(name, layer, want) for name, want in _LAYER.items()]
    differing = list(dict.fromkeys(said for said in found if said))
    if differing:
        return f"the NumPy decoder has Llama's blocks only, and of this model {', '.join(differing)}"
    if facts.model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        return f"the NumPy decoder is known to compute what the families {known} do, and this is {facts.model_type!r}"
    return ""


def _said(name: str, record: Any, want: Any) -> str:
    got = getattr(record, name)
    return "" if got == want else f"{name} is {got!r}"
