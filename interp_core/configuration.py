"""Read a model's configuration, and nothing else of it.

The configuration class is looked up in transformers' own table by ``model_type``, not through the
registry that other packages add to: importing some engines registers *their* class for a model type,
and the answer must not depend on what else the process has imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interp_core.errors import BackendUnavailable, ModelUnavailable
from interp_core.lazy import load_object

__all__ = ["read_configuration"]


def read_configuration(
    model_id: str, *, trust_remote_code: bool = False, classes: Mapping[str, str] | None = None
) -> Any:
    """The transformers configuration of a checkpoint folder or of a hub id (downloaded or cached).

    Args:
        model_id: the checkpoint.
        trust_remote_code: whether its own code may run.
        classes: ``"package.module:Class"`` per ``model_type`` that transformers does not know.

    Raises:
        ModelUnavailable: there is no such folder or id, or its configuration cannot be read.
        BackendUnavailable: transformers is not installed, so no backend is.
    """
    path = Path(model_id).expanduser()
    if path.exists():
        values = _local_values(path)
    elif model_id.startswith((".", "/", "~")) or model_id.count("/") > 1:
        raise ModelUnavailable(
            f"{path} is not there: a model is a folder with a config.json, or the id of one on the hub"
        )
    else:
        values = _hub_values(model_id)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelUnavailable(f"{model_id}: its configuration names no model_type, so it is not a transformers model")
    source = str(path) if path.exists() else model_id
    return _instance(source, model_type, values, trust_remote_code, classes or {})


def _local_values(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelUnavailable(f"{path} is a file; a model is a folder with a config.json, or the id of one on the hub")
    file = path / "config.json"
    if not file.is_file():
        raise ModelUnavailable(f"{path} holds no config.json, so it is not a checkpoint folder")
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelUnavailable(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelUnavailable(f"{file} is not a JSON object")
    return values


def _special_float(found: dict[str, Any]) -> Any:
    """What JSON has no number for, as transformers writes it into a configuration; any other object as it is."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _hub_values(model_id: str) -> dict[str, Any]:
    base = _transformers().PreTrainedConfig
    try:
        values, _ = base.get_config_dict(model_id)
    except Exception as error:  # transformers raises many kinds for one fact: the id cannot be had.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(
            f"{model_id!r} is neither a folder here nor a model that can be fetched or found in the cache: {reason}"
        ) from error
    if not values:
        raise ModelUnavailable(f"{model_id!r} is neither a folder here nor a model with a configuration")
    return dict(values)


def _instance(
    source: str, model_type: str, values: dict[str, Any], trust_remote_code: bool, classes: Mapping[str, str]
) -> Any:
    own = _own_class(model_type)
    try:
        if own is None and model_type in classes:
            own = load_object(classes[model_type])
        if own is not None and not (trust_remote_code and "auto_map" in values):
            return own.from_dict(values)
        return _transformers().AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:
        hint = "" if own is not None else f" transformers {_transformers().__version__} does not know {model_type!r}."
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(f"{source}: its configuration cannot be read: {reason}.{hint}") from error


def _own_class(model_type: str) -> Any:
    import importlib

    _transformers()
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    class_name = auto.CONFIG_MAPPING_NAMES.get(model_type)
    if class_name is None:
        return None
    module = auto.model_type_to_module_name(model_type)
    return getattr(importlib.import_module(f"transformers.models.{module}"), class_name)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailable(
            "reading a model's configuration needs transformers, which comes with a backend: "
            "pip install interp-eager (or interp-vllm)"
        ) from error
    return transformers
