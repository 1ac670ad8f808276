"""Load a transformers model from a checkpoint, whole or not at all."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from interp_core.checkpoint import require_weights
from interp_core.configuration import read_configuration
from interp_core.errors import BackendUnavailable, ModelUnavailable, RequestError
from interp_core.facts import ModelFacts
from interp_core.lazy import load_object
from interp_core.profile import ModelProfile
from interp_core.registry import own_configurations
from interp_eager.placement import placement

__all__ = ["load_weights"]


def load_weights(profile: ModelProfile, options: Mapping[str, Any]) -> Any:
    """The transformers model, in evaluation mode, on its device.

    Raises:
        ModelUnavailable: weights are missing or corrupt, or do not fit the configuration.
        BackendUnavailable: the device is not there.
        RequestError: an option cannot be served for this model.
    """
    placed = placement(profile.facts, options)
    model_id, facts = profile.model_id, profile.facts
    path = Path(model_id).expanduser()
    require_weights(model_id)
    if path.is_dir() and options.get("revision"):
        raise RequestError(f"revision={options['revision']!r} means nothing for a folder; give the id on the hub")
    _check_generation_config(path)
    own = () if profile.architecture is None else (profile.architecture,)
    config = read_configuration(
        model_id, trust_remote_code=options["trust_remote_code"], classes=own_configurations(own)
    )
    model_class = None if not own else own[0].models.get(profile.backend)
    kwargs: dict[str, Any] = {
        "config": config,
        "dtype": options["dtype"],
        "attn_implementation": _attention(facts, options),
        "trust_remote_code": options["trust_remote_code"],
        **placed.keywords,
    }
    if options.get("revision"):
        kwargs["revision"] = options["revision"]
    model = _from_pretrained(str(path) if path.is_dir() else model_id, config, model_class, kwargs)
    for parameter in model.parameters():
        # Quantised weights are integers, which have no gradients.
        parameter.requires_grad_(bool(options["requires_grad"]) and parameter.is_floating_point())
    return (model if placed.device is None else model.to(placed.device)).eval()


def _class_for(config: Any, target: str | None) -> Any:
    """The class to load: an architecture's own, or what transformers has for the configuration.

    A wrapper is loaded whole: for some, transformers also knows a class that holds their text model alone.
    """
    import transformers

    if target is not None:
        return load_object(target)
    autos = (transformers.AutoModelForMultimodalLM, transformers.AutoModelForCausalLM)
    found = next((auto for auto in autos if type(config) in auto._model_mapping), None)
    return found or _unlisted_class(config) or autos[-1]


def _unlisted_class(config: Any) -> Any:
    """The class of a configuration that transformers has no entry for: under its wrapper's name, or another's."""
    import transformers
    from transformers.models.auto import modeling_auto as lists

    family = type(config).__module__.rpartition(".")[0]
    listed = (*lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *lists.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items())
    for model_type, name in listed:
        if family.endswith(f".{model_type}"):
            found = getattr(transformers, name)
            if found.config_class is type(config):
                return found
    return None


def _from_pretrained(source: str, config: Any, target: str | None, kwargs: dict[str, Any]) -> Any:
    chosen = _class_for(config, target)
    _require_text_alone(source, chosen, config)
    try:
        model, report = chosen.from_pretrained(source, output_loading_info=True, **kwargs)
    except ImportError as error:
        raise BackendUnavailable(f"{source}: transformers needs a package that is not installed: {error}") from error
    except Exception as error:  # safetensors, json, OS and shape errors all mean: these weights cannot be had.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(f"{source}: its weights cannot be loaded: {reason}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers fills what is missing with random numbers and goes on; then every number is wrong.
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelUnavailable(f"{source}: weights are missing from the checkpoint: {shown}")
    _warn_of_unused(source, sorted(report["unexpected_keys"]))
    return model


def _require_text_alone(source: str, chosen: Any, config: Any) -> None:
    """Some wrappers have no forward without an image, and some, made of several models, have none at all."""
    listed = getattr(chosen, "_model_mapping", None)
    if listed is not None and type(config) not in listed:
        return  # The checkpoint's own code: its class is not known before it is loaded.
    model_class = chosen if listed is None else listed[type(config)]
    if model_class.forward is nn.Module.forward:
        raise ModelUnavailable(
            f"{source}: {model_class.__name__} has no forward of its own, since it is made of several models; "
            "load the checkpoint of the one that reads text"
        )
    needed = [
        name
        for name, parameter in inspect.signature(model_class.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in ("self", "input_ids")
    ]
    if needed:
        raise ModelUnavailable(
            f"{source}: {model_class.__name__} needs {' and '.join(needed)} in every forward, "
            "so it cannot run on text alone"
        )


def _warn_of_unused(source: str, names: list[str]) -> None:
    """Weights that the configuration has no place for: a hint that it is not this checkpoint's own."""
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(f"{source}: the configuration has no place for weights of the checkpoint: {shown}", stacklevel=2)


def _check_generation_config(folder: Path) -> None:
    """transformers passes over a file that it cannot read, and generation then never ends where it should."""
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelUnavailable(f"{file} cannot be read as JSON: {error}") from error


def _attention(facts: ModelFacts, options: Mapping[str, Any]) -> str | None:
    asked = options.get("attn_implementation")
    if facts.attn_softcap is None:
        return asked
    # transformers' sdpa drops the softcap without a word: measured logit differences up to 0.6.
    if asked not in (None, "eager"):
        raise RequestError(
            f"attn_implementation={asked!r} would drop this family's attention softcap; leave it out, or say 'eager'"
        )
    return "eager"
