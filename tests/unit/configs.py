"""Configurations for the tests of facts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import transformers

from interp_core.facts import ModelFacts
from interp_core.facts_reader import read_facts

transformers.logging.set_verbosity_error()


__all__ = ["config", "facts", "plain"]


def config(model_type: str, **values: Any) -> Any:
    return transformers.CONFIG_MAPPING[model_type](**values)


def facts(model_type: str, **values: Any) -> ModelFacts:
    return read_facts(config(model_type, **values))


def plain(**values: Any) -> SimpleNamespace:
    """A configuration of no known class: nothing but attributes."""
    base = {"model_type": "plain", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 50}
    return SimpleNamespace(**{**base, "num_attention_heads": 4, "intermediate_size": 80, **values})
