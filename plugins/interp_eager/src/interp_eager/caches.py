"""What a model keeps between the forwards of one generation: which object, and under which keyword it takes it."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

from interp_core.facts import ModelFacts

__all__ = ["cache_keyword", "empty_cache"]

_KEYWORDS: Final = ("past_key_values", "cache_params")


def cache_keyword(model: Any) -> str:
    """The keyword of the model's forward that takes its cache: state spaces have one of their own. Empty for none."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in _KEYWORDS if name in known), "")


def empty_cache(model: Any, facts: ModelFacts, *, windows: bool = True) -> Any:
    """An empty cache of the model's own kind; without ``windows``, one that keeps every column."""
    from transformers import DynamicCache

    own, config = _own_class(model), model.config
    if own is not None:
        return own()
    # Of a decoder that is half of an encoder-decoder, transformers counts the layers of the other half.
    stated = getattr(config.get_text_config(decoder=True), "num_hidden_layers", facts.n_layers)
    return DynamicCache(config=config) if windows and stated == facts.n_layers else DynamicCache()


def _own_class(model: Any) -> Any:
    """The cache that a model's code defines for itself and insists on, or ``None``."""
    from transformers.cache_utils import Cache

    module = sys.modules[type(model).__module__]
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Cache) and value.__module__ == module.__name__:
            return value
    return None
