"""Whether two records say the same, the fields that their own ``==`` leaves out included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["differing"]


def differing(one: Any, other: Any, where: str = "") -> str:
    """Where two values first differ, as a path such as ``points['z'].why``; empty if nowhere."""
    if type(one) is not type(other):
        return where or "the type"
    if attrs.has(type(one)):
        for field in attrs.fields(type(one)):
            found = differing(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}".lstrip("."))
            if found:
                return found
        return ""
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return f"the keys of {where}"
        return next((d for key in one if (d := differing(one[key], other[key], f"{where}[{key!r}]"))), "")
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"the length of {where}"
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := differing(a, b, f"{where}[{i}]"))), "")
    return "" if one is other or one == other else where
