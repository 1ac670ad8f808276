"""How new tokens are chosen: the keywords, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from interp_core.errors import RequestError
from interp_core.requests import Sampling

__all__ = ["read_count", "read_sampling", "read_stop"]


def read_sampling(
    max_tokens: Any, temperature: Any, seed: Any, top_k: Any, top_p: Any, min_p: Any, ignore_eos: Any
) -> Sampling:
    """Check sampling keywords.

    Raises:
        RequestError: one of them is not a valid value; the message says which are.
    """
    if not isinstance(ignore_eos, bool):
        raise RequestError(f"ignore_eos is True or False, not {ignore_eos!r}")
    return Sampling(
        max_tokens=_whole("max_tokens", max_tokens, least=1),
        temperature=_number("temperature", temperature, 0.0, math.inf),
        top_k=None if top_k is None else _whole("top_k", top_k, least=1),
        top_p=None if top_p is None else _number("top_p", top_p, 0.0, 1.0, open_low=True),
        min_p=None if min_p is None else _number("min_p", min_p, 0.0, 1.0),
        seed=None if seed is None else _whole("seed", seed, least=0),
        stop_token_ids=frozenset() if ignore_eos else None,
    )


def read_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        RequestError: one is empty or not text.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop is text, or a list of texts that are not empty, not {stop!r}")
    return strings


def read_count(name: str, value: Any) -> int:
    """A whole number of at least 1.

    Raises:
        RequestError: it is not one.
    """
    return _whole(name, value, least=1)


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise RequestError(f"{name} is a whole number of at least {least}, not {value!r}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits or not math.isfinite(value) or (open_low and value == low):
        limit = "of at least 0" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} is a number {limit}, not {value!r}")
    return float(value)
