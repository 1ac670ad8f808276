"""Typed converters for attrs fields: mypy infers nothing from a bare ``tuple`` or ``frozenset``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["as_frozenset", "as_tuple"]


def as_tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    """Any iterable as a tuple."""
    return tuple(values)


def as_frozenset(values: Iterable[Any]) -> frozenset[Any]:
    """Any iterable as a frozenset."""
    return frozenset(values)
