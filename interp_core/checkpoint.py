"""What can be said of a checkpoint folder before any engine reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from interp_core.errors import ModelUnavailable

__all__ = ["require_weights"]

_WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")


def require_weights(model_id: str) -> None:
    """Refuse a folder without weights; an id on the hub is the engine's affair.

    Raises:
        ModelUnavailable: the folder is there and holds a configuration only.
    """
    path = Path(model_id).expanduser()
    if path.is_dir() and not any(next(path.glob(p), None) for p in _WEIGHT_FILES):
        raise ModelUnavailable(f"{path} holds a configuration but no weights, so nothing can run")
