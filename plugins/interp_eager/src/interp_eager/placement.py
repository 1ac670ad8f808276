"""Where weights go and in what form: options that pass through to transformers, refused where they cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch
from attrs import field, frozen

from interp_core.errors import BackendUnavailable, RequestError
from interp_core.facts import ModelFacts

__all__ = ["Placement", "placement"]

# What transformers imports for a quantisation method (its own names of the methods), and how it is installed.
_PACKAGES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "bitsandbytes": (("bitsandbytes", "accelerate"), "pip install bitsandbytes accelerate"),
    "gptq": (("optimum", "gptqmodel"), "pip install optimum gptqmodel"),
    "awq": (("gptqmodel",), "pip install gptqmodel"),
    "torchao": (("torchao",), "pip install torchao"),
    "quanto": (("optimum",), "pip install optimum-quanto"),
    "hqq": (("hqq",), "pip install hqq"),
    "compressed-tensors": (("compressed_tensors",), "pip install compressed-tensors"),
}


@frozen(kw_only=True)
class Placement:
    """How a checkpoint is loaded.

    Attributes:
        keywords: what ``from_pretrained`` gets.
        device: where the model is moved afterwards; ``None`` if transformers has placed it.
    """

    keywords: Mapping[str, Any] = field(factory=dict)
    device: torch.device | None = None


def placement(facts: ModelFacts, options: Mapping[str, Any]) -> Placement:
    """The keywords of ``from_pretrained`` for ``device``, ``device_map``, ``max_memory`` and ``quantization_config``.

    Raises:
        RequestError: options contradict each other.
        BackendUnavailable: the device is not there, or the package that a method needs is not installed.
    """
    quantization, device_map = options.get("quantization_config"), options.get("device_map")
    keywords: dict[str, Any] = {}
    method = _method(quantization) if quantization is not None else facts.quantization
    if method is not None:
        _require(method, f"quantised weights ({method})")
    if quantization is not None:
        if facts.quantization is not None:
            raise RequestError(
                f"the checkpoint is quantised already ({facts.quantization}): leave quantization_config out"
            )
        keywords["quantization_config"] = quantization
    if device_map is None and options.get("max_memory") is not None:
        raise RequestError("max_memory says how much a device_map may use: give device_map='auto' too")
    if device_map is None and method is None:
        return Placement(keywords=keywords, device=_device(options["device"]))
    if device_map is not None and options["device"] is not None:
        raise RequestError("device and device_map both say where the weights go: give one of them")
    if device_map is None and options["device"] is not None:
        # Quantised weights are made where they stay.
        device_map = {"": str(_device(options["device"]))}
    if device_map is not None:
        _require_package("accelerate", "device_map", "pip install accelerate")
        keywords["device_map"] = device_map
        if options.get("max_memory") is not None:
            keywords["max_memory"] = options["max_memory"]
    return Placement(keywords=keywords)


def _method(quantization: Any) -> str:
    """transformers' name of the method that a quantisation configuration, or a dictionary of one, asks for."""
    stated = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    stated = stated or getattr(quantization, "quant_method", None)
    if stated is None and isinstance(quantization, Mapping) and {"load_in_4bit", "load_in_8bit"} & set(quantization):
        stated = "bitsandbytes"
    if stated is None:
        raise RequestError(
            "quantization_config is one of transformers' configurations, such as BitsAndBytesConfig(load_in_4bit="
            f"True), or a dictionary with its quant_method; not {quantization!r}"
        )
    name = str(getattr(stated, "value", stated))
    return "bitsandbytes" if name.startswith("bitsandbytes") else name


def _require(method: str, what: str) -> None:
    packages, install = _PACKAGES.get(method, ((), ""))
    for package in packages:
        _require_package(package, what, install)


def _require_package(package: str, what: str, install: str) -> None:
    if find_spec(package) is None:
        raise BackendUnavailable(f"{what} needs the package {package!r}, which is not installed: {install}")


def _device(stated: str | None) -> torch.device:
    name = stated or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackendUnavailable(f"device {name!r} cannot be used here: {reason}") from error
    return device
