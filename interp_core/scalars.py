"""Numbers that users pass: Python's, NumPy's and one-element tensors alike, and nothing that only looks like one."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

__all__ = ["real_number", "whole_number"]


def whole_number(value: Any) -> int | None:
    """``value`` as an ``int``, or ``None`` if it is no whole number. A ``bool`` is never one.

    A tensor has ``__index__`` whatever it holds, so the attribute proves nothing: the call does.
    """
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def real_number(value: Any) -> float | None:
    """``value`` as a finite ``float``, or ``None`` if it is no such number. A ``bool`` is never one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    found = float(value)
    return found if math.isfinite(found) else None
