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


def empty_cache(model: Any, facts: ModelFacts, *, rows: int = 1, windows: bool = True) -> Any:
    """An empty cache of the model's own kind for ``rows`` prompts; without ``windows``, one that keeps every column."""
    from transformers import DynamicCache

    own, config = _own_class(model), model.config
    if own is not None and _sized(own):
        # States are there from the beginning, as zeros of the model's dtype.
        return own(config=config, max_batch_size=rows, dtype=model.dtype, device=model.device)
    if own is not None:
        return own()
    # Of a decoder that is half of an encoder-decoder, transformers counts the layers of the other half.
    stated = getattr(config.get_text_config(decoder=True), "num_hidden_layers", facts.n_layers)
    if not windows or stated != facts.n_layers:
        return DynamicCache()
    cache = DynamicCache(config=config)
    return cache if _fits(cache, facts) else DynamicCache()


def _fits(cache: Any, facts: ModelFacts) -> bool:
    """Whether layers of keys have a window where the trunk has; transformers makes them by the configuration's types.

    Qwen3-MoE has one mask for all layers, whatever types are stated. A cache that keeps every column is always right.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return True
    pairs = zip(cache.layers, facts.layers, strict=False)  # layers that share keys have none of their own
    # A layer without softmax attention keeps no keys, whatever transformers has made for it.
    return all(layer.is_sliding == (known.window is not None) for layer, known in pairs if known.softmax)


def _own_class(model: Any) -> Any:
    """The cache that a model's code defines for itself and insists on, or ``None``."""
    from transformers.cache_utils import Cache

    module = sys.modules[type(model).__module__]
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    return next((v for v in own if issubclass(v, Cache) or (v.__name__.endswith("Cache") and _sized(v))), None)


def _sized(cache: Any) -> bool:
    """Whether a class of caches is made for a number of prompts."""
    return "max_batch_size" in inspect.signature(cache).parameters
