"""The vLLM backends of interp-core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp_vllm.own import attach as attach
    from interp_vllm.own import engine_options as engine_options
    from interp_vllm.own import steering_body as steering_body

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The entry point imports this package, and has to stay light.
    if name in ("attach", "engine_options", "steering_body"):
        from interp_vllm import own

        return getattr(own, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
