"""Models and configurations that an architecture of another distribution brings, made known to vLLM in this process.

Only where such a model is loaded: in the caller's process before vLLM reads the checkpoint, and in the engine's worker
before the model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interp_core.lazy import load_object

if TYPE_CHECKING:
    from interp_core.profile import ModelProfile

__all__ = ["brings_model", "register"]

_KEY: Final = "vllm"
"""Key of ``Architecture.models``, for all three backends of this distribution."""


def brings_model(profile: ModelProfile) -> bool:
    """Whether the architecture brings vLLM's class of the model."""
    return profile.architecture is not None and _KEY in profile.architecture.models


def register(profile: ModelProfile) -> None:
    """Register what the profile's architecture brings; nothing if it brings nothing. May be called twice."""
    architecture = profile.architecture
    if architecture is None:
        return
    if architecture.config:
        from transformers import AutoConfig

        for model_type in architecture.claim.model_types:
            AutoConfig.register(model_type, load_object(architecture.config), exist_ok=True)
    if _KEY in architecture.models:
        from vllm import ModelRegistry

        ModelRegistry.register_model(profile.facts.architecture, architecture.models[_KEY])
