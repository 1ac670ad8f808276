"""Chat formats that a checkpoint ships as Python code in place of a template, run only where its code is trusted.

Such a checkpoint has ``encoding/encoding_<name>.py`` with ``encode_messages(messages, thinking_mode=...)``, which
writes a whole conversation as text, special tokens and the opening of the next answer included.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from interp_core.errors import ModelUnavailable, RequestError

__all__ = ["chat_code", "encoded_chat"]

_PATTERN: Final = "encoding/encoding_*.py"


def chat_code(model_id: str) -> Path | None:
    """The file of a checkpoint that writes conversations, or ``None``. Nothing of it is run.

    Raises:
        ModelUnavailable: there are several.
    """
    folder = Path(model_id).expanduser()
    if not folder.is_dir():
        fetched = _fetched(model_id)
        if fetched is None:
            return None
        folder = fetched
    found = sorted(folder.glob(_PATTERN))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelUnavailable(f"{model_id}: several files could write its conversations: {names}")
    return found[0] if found else None


def encoded_chat(file: Path, messages: Sequence[Any], *, add_generation_prompt: bool, options: dict[str, Any]) -> str:
    """A conversation as the checkpoint's own code writes it.

    Args:
        file: what :func:`chat_code` found. It is imported, and runs.
        messages: dictionaries with ``role`` and ``content``.
        add_generation_prompt: whether the text ends with the opening of the next answer.
        options: further arguments of its ``encode_messages``; ``thinking_mode`` is ``"chat"`` unless it is given.

    Raises:
        ModelUnavailable: the file cannot be imported, or has no ``encode_messages``.
        RequestError: the messages do not fit it, or it cannot leave the opening out.
    """
    asks = bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant"
    if asks and not add_generation_prompt:
        raise RequestError(
            f"{file.name} opens the next answer behind every question, so add_generation_prompt=False cannot be served"
        )
    try:
        encode = _module(file).encode_messages
    except (Exception, SystemExit) as error:
        # It is somebody's code: whatever it raises, its conversations cannot be written.
        raise ModelUnavailable(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    try:
        text = encode(list(messages), **{"thinking_mode": "chat", **options})
    except (Exception, SystemExit) as error:
        raise RequestError(f"the messages do not fit {file.name}: {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise ModelUnavailable(f"{file}: its encode_messages gave {type(text).__name__}, not text")
    return text


def _fetched(model_id: str) -> Path | None:
    """The folder of a hub id's chat code, from the cache or the hub."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model_id, allow_patterns=_PATTERN))
    except Exception:  # noqa: BLE001  Offline, private or gone: the checkpoint's tokenizer was read, and has no template.
        return None


def _module(file: Path) -> Any:
    name = f"_interp_chat_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
