"""How new tokens are chosen: the keywords, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from interp_core.errors import RequestError
from interp_core.requests import Sampling
from interp_core.scalars import real_number, whole_number

__all__ = ["read_count", "read_sampling", "read_stop"]

LEAST_TEMPERATURE: Final = 1e-4
"""Below this, dividing logits by the temperature overflows before it changes any choice."""


def read_sampling(
    max_tokens: Any,
    temperature: Any,
    seed: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    repetition_penalty: Any,
    ignore_eos: Any,
) -> Sampling:
    """Check sampling keywords.

    Raises:
        RequestError: one of them is not a valid value; the message says which are.
    """
    if not isinstance(ignore_eos, bool):
        raise RequestError(f"ignore_eos is True or False, not {ignore_eos!r}")
    return Sampling(
        max_tokens=_whole("max_tokens", max_tokens, least=1),
        temperature=_temperature(temperature),
        top_k=None if top_k is None else _whole("top_k", top_k, least=1),
        top_p=None if top_p is None else _number("top_p", top_p, 0.0, 1.0, open_low=True),
        min_p=None if min_p is None else _number("min_p", min_p, 0.0, 1.0),
        repetition_penalty=_number("repetition_penalty", repetition_penalty, 0.0, math.inf, open_low=True),
        seed=None if seed is None else _whole("seed", seed, least=0, most=2**63 - 1),
        stop_token_ids=frozenset() if ignore_eos else None,
    )


def read_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        RequestError: one is empty or not text.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    if not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop is text, or a list of texts that are not empty, not {stop!r}")
    return strings


def read_count(name: str, value: Any) -> int:
    """A whole number of at least 1.

    Raises:
        RequestError: it is not one.
    """
    return _whole(name, value, least=1)


def _whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    number = whole_number(value)
    if number is None or number < least or (most is not None and number > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} is a whole number {limit}, not {value!r}")
    return number


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    number = real_number(value)
    if number is None or not low <= number <= high or (open_low and number == low):
        limit = f"from {low:g} to {high:g}" if high < math.inf else "above 0" if open_low else "of at least 0"
        raise RequestError(f"{name} is a number {limit}, not {value!r}")
    return number


def _temperature(value: Any) -> float:
    number = _number("temperature", value, 0.0, math.inf)
    if 0.0 < number < LEAST_TEMPERATURE:
        raise RequestError(f"temperature is 0 (greedy) or at least {LEAST_TEMPERATURE:g}, not {value!r}")
    return number
