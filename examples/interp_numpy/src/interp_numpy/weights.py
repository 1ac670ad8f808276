"""Read a checkpoint folder: weights in float32, the frequencies of its rotary embedding, and where generation ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from interp_core import BackendUnavailable, ModelFacts, ModelUnavailable
from interp_core.checkpoint import end_tokens, require_weights

__all__ = ["Array", "read_ends", "read_weights", "rotary_frequencies"]

Array = NDArray[Any]


def read_weights(folder: Path, facts: ModelFacts) -> dict[str, Array]:
    """Every weight by its name in the checkpoint, float32.

    Raises:
        ModelUnavailable: one is missing, of another shape, or none of a Llama's; or a file cannot be read.
    """
    needed = _shapes(facts)
    found: dict[str, Array] = {}
    for file in _files(folder):
        try:
            # Through torch, which knows bfloat16; float32 tensors stay views of the mapped file.
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name).to(torch.float32).numpy() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelUnavailable(f"{file} cannot be read: {error}") from error
    if facts.tied_embeddings and "model.embed_tokens.weight" in found:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    found = {name: value for name, value in found.items() if not name.endswith("rotary_emb.inv_freq")}
    missing = [name for name in needed if name not in found and not name.endswith(".bias")]
    strange = [name for name, value in found.items() if needed.get(name) != value.shape]
    if missing or strange:
        what = f"lacks {missing[0]}" if missing else f"holds {strange[0]}, of shape {found[strange[0]].shape}"
        raise ModelUnavailable(f"{folder} {what}: those are not the weights of a Llama of its configuration")
    return found


def _shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint may have; all but biases are needed."""
    wide, vocab = facts.d_model, facts.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (wide,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocab, wide))
    for layer in facts.layers:
        queries, keys = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        block = f"model.layers.{layer.index}."
        shapes |= dict.fromkeys((f"{block}input_layernorm.weight", f"{block}post_attention_layernorm.weight"), (wide,))
        attention = {
            "q_proj": (queries, wide),
            "k_proj": (keys, wide),
            "v_proj": (keys, wide),
            "o_proj": (wide, queries),
        }
        mlp = {"gate_proj": (layer.d_mlp, wide), "up_proj": (layer.d_mlp, wide), "down_proj": (wide, layer.d_mlp)}
        for part, matrices in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in matrices.items():
                shapes[f"{block}{part}.{name}.weight"] = shape
                shapes[f"{block}{part}.{name}.bias"] = shape[:1]
    return shapes


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ModelUnavailable(
            f"{folder} is no folder, and this backend fetches nothing: give the folder of a downloaded checkpoint"
        )
    require_weights(str(folder))
    index = folder / "model.safetensors.index.json"
    names = set(_json(index).get("weight_map", {}).values()) if index.is_file() else {"model.safetensors"}
    missing = [name for name in sorted(names) if not (folder / name).is_file()]
    if missing or not names:
        raise ModelUnavailable(f"{folder} lacks {missing or 'a weight_map'}: this backend reads safetensors only")
    return [folder / name for name in sorted(names)]


def read_ends(folder: Path, facts: ModelFacts) -> frozenset[int]:
    """Ids that end a generation."""
    file = folder / "generation_config.json"
    stated = _json(file).get("eos_token_id") if file.is_file() else None
    return end_tokens(str(folder), stated, facts.eos_token_ids)


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelUnavailable(f"{file} cannot be read as a JSON object: {error}") from error


def rotary_frequencies(config: Any, width: int) -> Array:
    """Radians per position of each pair of a head, ``[width / 2]``.

    Raises:
        BackendUnavailable: the configuration scales them in a way that is not written here.
    """
    stated = dict(getattr(config, "rope_parameters", None) or {})
    kind = stated.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3") or stated.get("partial_rotary_factor", 1.0) != 1.0:
        raise BackendUnavailable(f"the NumPy decoder does not scale rotary embeddings as {stated}; use backend='eager'")
    powers = np.arange(0, width, 2, dtype=np.float32) / width
    plain: Array = 1.0 / np.float32(stated.get("rope_theta", 10000.0)) ** powers
    if kind == "default":
        return plain
    slow = plain / np.float32(stated["factor"])
    if kind == "linear":
        return slow
    low, high = stated["low_freq_factor"], stated["high_freq_factor"]
    turns = stated["original_max_position_embeddings"] * plain / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1.0 - share) * slow + share * plain, dtype=np.float32)
