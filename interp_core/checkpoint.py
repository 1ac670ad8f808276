"""What can be said of a checkpoint folder before any engine reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from interp_core.errors import ModelUnavailable
from interp_core.scalars import whole_number

__all__ = ["end_tokens", "require_weights"]

_WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")


def require_weights(model_id: str) -> None:
    """Refuse a folder without weights; an id on the hub is the engine's affair.

    Raises:
        ModelUnavailable: the folder is there and holds a configuration only.
    """
    path = Path(model_id).expanduser()
    if path.is_dir() and not any(next(path.glob(p), None) for p in _WEIGHT_FILES):
        raise ModelUnavailable(f"{path} holds a configuration but no weights, so nothing can run")


def end_tokens(model_id: str, stated: Any, otherwise: Iterable[int]) -> frozenset[int]:
    """Ids that end a generation.

    Args:
        model_id: for the message.
        stated: ``eos_token_id`` of the generation configuration: an id, several, or ``None``.
        otherwise: ids of the configuration, for where that states none.

    Raises:
        ModelUnavailable: what is stated is no token id.
    """
    if stated is None:
        return frozenset(otherwise)
    listed = stated if isinstance(stated, (list, tuple)) else [stated]
    if any(whole_number(end) is None for end in listed):
        raise ModelUnavailable(f"{model_id}: the eos_token_id to generate with is {stated!r}, no token id")
    return frozenset(map(int, listed))
