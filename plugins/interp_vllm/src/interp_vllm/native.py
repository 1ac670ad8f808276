"""Which of vLLM's own model classes the tables of this plugin know, and how each carries the residual stream.

Readable without vLLM: whether an engine will run vLLM's own classes or transformers' module tree is a question
about a model that has to be answered from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interp_core.facts import ModelFacts

__all__ = ["FUSED", "PLAIN", "model_impl"]

FUSED: Final = frozenset(
    "LlamaForCausalLM MistralForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM "
    "Gemma2ForCausalLM Gemma3ForCausalLM MixtralForCausalLM Qwen3MoeForCausalLM".split()
)
"""Blocks take and give ``(hidden_states, residual)``; the stream is their sum, and norms fuse the addition."""

PLAIN: Final = frozenset({"GPT2LMHeadModel"})
"""Blocks take and give the stream itself, as in transformers."""


def model_impl(facts: ModelFacts, options: Mapping[str, Any]) -> str:
    """``"vllm"`` for vLLM's own class, or ``"transformers"`` for transformers' module tree inside vLLM."""
    asked = options.get("model_impl") or "auto"
    if asked == "auto":
        return "vllm" if facts.architecture in FUSED | PLAIN else "transformers"
    return str(asked)
