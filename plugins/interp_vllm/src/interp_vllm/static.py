"""What a compiled vLLM serves: addresses declared at load, from options and facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from interp_core.backend import StaticSets
from interp_core.errors import BackendUnavailable, RequestError
from interp_core.facts import ModelFacts

if TYPE_CHECKING:
    from interp_core.profile import ModelProfile

__all__ = ["CAPACITY", "DEPTH", "buffer_bytes", "check_memory", "declared_sets", "step_tokens"]

CAPACITY: Final = 512
"""Vectors that all requests together may have at one write site."""

DEPTH: Final = 4
"""Operations on one row at one write site."""

_STEP_TOKENS: Final = 2048
_ITEM: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

AUTO = "auto"


def declared_sets(facts: ModelFacts, options: Mapping[str, Any]) -> StaticSets:
    """Read taps and write sites.

    ``"auto"`` taps every block's output (the whole stack of streams where a trunk has several).

    Raises:
        RequestError: a set is empty, or a string other than ``"auto"``.
    """
    automatic = ("resid_post.*",) if facts.n_streams == 1 else ("resid_streams.*",)
    points = _listed("static_points", options["static_points"], automatic)
    writes = _listed("static_writes", options["static_writes"], points)
    return StaticSets(points=points, writes=writes, memory=lambda profile: buffer_bytes(profile, step_tokens(options)))


def step_tokens(options: Mapping[str, Any]) -> int:
    """Most rows of one step of a compiled engine."""
    return int(options.get("max_num_batched_tokens") or max(_STEP_TOKENS, options.get("max_model_len") or 0))


def buffer_bytes(profile: ModelProfile, tokens: int) -> int:
    """Memory of all taps and tables, on each rank."""
    kind = profile.facts.dtype if profile.options["dtype"] == "auto" else profile.options["dtype"]
    item = _ITEM.get(str(kind or "float32"), 4)
    reads = sum(math.prod(profile.shape(address)) for address in profile.static_points)
    writes = sum(math.prod(profile.shape(address)) for address in profile.static_writes)
    row = 5 * 8 + 7 * 4  # an index and the numbers of a program
    return reads * tokens * item + writes * CAPACITY * 4 + len(profile.static_writes) * DEPTH * tokens * row


def check_memory(profile: ModelProfile, tokens: int) -> None:
    """Refuse a declaration that cannot fit into this machine.

    Raises:
        BackendUnavailable: its buffers need more than is free; the message has the numbers.
    """
    import psutil

    needed, free = buffer_bytes(profile, tokens), psutil.virtual_memory().available
    if needed > free:
        raise BackendUnavailable(
            f"{len(profile.static_points)} taps and {len(profile.static_writes)} write sites of {tokens} tokens need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; declare fewer in static_points and "
            "static_writes, or a smaller max_num_batched_tokens"
        )


def _listed(keyword: str, value: Any, automatic: tuple[str, ...]) -> tuple[str, ...]:
    if value == AUTO:
        return automatic
    if isinstance(value, str):
        raise RequestError(f"{keyword} is 'auto' or a list of addresses such as [{value!r}], not one string")
    if not value:
        raise RequestError(f"{keyword}=[] would declare nothing; say 'auto', or use backend='vllm-generate'")
    return tuple(str(item) for item in value)
