"""A tiny DeepSeek-V4 in both of its forms: as transformers saves it, and as it is published, which vLLM reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from trunks import save

__all__ = ["both_forms"]

# vLLM's kernels are written for the sizes of the real models in everything that attention has.
_SIZES: Final = {
    "vocab_size": 300,
    "hidden_size": 128,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "index_n_heads": 2,
    "sliding_window": 128,
    "max_position_embeddings": 1024,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}


def both_forms(root: Path) -> tuple[str, str]:
    """Folders of the same weights: transformers' form, and the published one."""
    saved = save("deepseek_v4", root, **_SIZES)
    published = Path(f"{saved}-published")
    if not published.exists():
        shutil.copytree(saved, published)
        _rewrite_configuration(published / "config.json")
        weights = published / "model.safetensors"
        renamed = {_name(key): tensor for key, tensor in load_file(weights).items()}
        save_file(renamed, weights, metadata={"format": "pt"})
    return saved, str(published)


def _rewrite_configuration(file: Path) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del values[key]
    values |= {
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
        "topk_method": "noaux_tc",
        "expert_dtype": "fp8",
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "default",
            "rope_type": "default",
            "factor": 1.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    file.write_text(json.dumps(values), encoding="utf-8")


def _name(key: str) -> str:
    key = key.replace("model.hc_head.hc_", "hc_head_").removeprefix("model.")
    if key.endswith(".attn.norm.weight"):
        key = key.removesuffix("norm.weight") + "kv_norm.weight"
    return key.replace("embed_tokens.weight", "embed.weight")
