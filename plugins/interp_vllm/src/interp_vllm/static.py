"""What a compiled vLLM serves: addresses declared at load, from options and facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interp_core.backend import StaticSets
from interp_core.errors import RequestError
from interp_core.facts import ModelFacts

__all__ = ["declared_sets"]

AUTO = "auto"


def declared_sets(facts: ModelFacts, options: Mapping[str, Any]) -> StaticSets:
    """Read taps and write sites.

    ``"auto"`` taps every block's output (the whole stack of streams where a trunk has several).

    Raises:
        RequestError: a set is empty, or a string other than ``"auto"``.
    """
    automatic = ("resid_post.*",) if facts.n_streams == 1 else ("resid_streams.*",)
    points = _listed("static_points", options["static_points"], automatic)
    return StaticSets(points=points, writes=_listed("static_writes", options["static_writes"], points))


def _listed(keyword: str, value: Any, automatic: tuple[str, ...]) -> tuple[str, ...]:
    if value == AUTO:
        return automatic
    if isinstance(value, str):
        raise RequestError(f"{keyword} is 'auto' or a list of addresses such as [{value!r}], not one string")
    if not value:
        raise RequestError(f"{keyword}=[] would declare nothing; say 'auto', or use backend='vllm-generate'")
    return tuple(str(item) for item in value)
