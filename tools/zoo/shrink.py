"""From a configuration class to a small instance of it, by the rules and the families' own values."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo.families import CONFIGS, EXTRA_KEYS
from zoo.rules import HEADS, KEPT_WHEN_UNSET, SIZES

__all__ = ["shrunk"]


def shrunk(config_class: Any, default: Any = None) -> Any:
    """A small configuration of a class.

    Args:
        config_class: any configuration class of transformers.
        default: the instance that says which fields are set; ``None`` for the class's own defaults.

    Raises:
        ValueError: a family's own values name a field that its configuration does not have.
    """
    default = config_class() if default is None else default
    values = _sizes(config_class, default)
    known = _fields(config_class) | set(getattr(config_class, "attribute_map", {})) | EXTRA_KEYS
    for name in getattr(config_class, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None:
            values[name] = shrunk(type(inner), inner)
    if "kv_lora_rank" in _fields(config_class) and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # Keys from a latent vector: one per query head.
    own = CONFIGS.get(config_class.model_type, {})
    unknown = sorted(own.keys() - known)
    if unknown:
        raise ValueError(f"{config_class.__name__} has no field {', '.join(unknown)}")
    values |= own
    for name in getattr(config_class, "sub_configs", {}):
        if isinstance(values.get(name), str):
            values[name] = shrunk(CONFIG_MAPPING[values[name]])
    return config_class(**values)


def _fields(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def _sizes(config_class: Any, default: Any) -> dict[str, Any]:
    found = {}
    for name in _fields(config_class) & SIZES.keys():
        try:
            value = getattr(default, name, None)
        except Exception:  # noqa: BLE001 - keys that differ per layer raise an error of their own, and are set.
            value = SIZES[name]
        listed = isinstance(value, (bool, list, tuple, dict))
        if not listed and (value is not None or name in KEPT_WHEN_UNSET):
            found[name] = SIZES[name]
    return found
