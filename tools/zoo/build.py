"""Build the tiny model of a named architecture, with nothing in it left at a trivial value.

names()                    # every name: keys of transformers' causal mapping, and wrappers as "mm:key"
model = build("gemma2")    # a transformers model: random, float32, in evaluation mode
save("gemma2", folder)     # the same as a checkpoint
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zoo.rules import ENLARGED, EXPERTS
from zoo.shrink import shrunk

__all__ = ["WRAPPER", "build", "class_name", "names", "save"]

WRAPPER = "mm:"
"""Prefix of an image or audio wrapper, which is run on text alone."""

_MAX_PARAMETERS = 60_000_000


def names() -> dict[str, str]:
    """Every architecture, with the class that transformers has for it."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for mapping in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for key, name in mapping.items():
            if found.get(key) != name:
                found[WRAPPER + key] = name
    return found


def class_name(name: str) -> str:
    """The model class of a name.

    Raises:
        KeyError: there is no such architecture.
    """
    return names()[name]


def build(name: str, *, seed: int = 0) -> Any:
    """The tiny model of ``name``; equal for equal seeds.

    Raises:
        KeyError: there is no such architecture.
        ValueError: the rules do not make it small.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, class_name(name))
    config_class = CONFIG_MAPPING[name.removeprefix(WRAPPER)]
    own = model_class.config_class
    config = shrunk(config_class if own is None or own.__name__ == config_class.__name__ else own)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # Families that are encoders by default are decoders by this switch.
    _require_small(model_class, config)
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    randomise(model, seed + 1)
    return model


def save(name: str, folder: Path) -> Path:
    """The checkpoint of ``name`` in ``folder``."""
    build(name).save_pretrained(folder)
    return folder


def randomise(model: Any, seed: int) -> None:
    """Perturb in place what initialisers leave constant, and enlarge what makes scores, choices and embeddings."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            _perturb(name, tensor, generator)
        kept = set(model.state_dict())
        for name, tensor in model.named_buffers():
            if name in kept:
                _perturb_buffer(name, tensor, generator)


def _perturb(name: str, tensor: Any, generator: torch.Generator) -> None:
    parts = name.split(".")
    if _constant(tensor):
        tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    elif tensor.dim() > 1 and any(part in ENLARGED for part in parts):
        tensor.mul_(8.0)
    elif "embed" in name or "wte" in parts:
        tensor.mul_(10.0)  # So that tokens differ by more than the blocks' biases add.


def _perturb_buffer(name: str, tensor: Any, generator: torch.Generator) -> None:
    if not _constant(tensor):
        return
    if tensor.is_floating_point():
        tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    elif name.endswith("tid2eid"):
        # Experts by token id: any two different ones per token.
        rows = torch.stack(
            [torch.randperm(EXPERTS, generator=generator)[: tensor.shape[1]] for _ in range(tensor.shape[0])]
        )
        tensor.copy_(rows)


def _constant(tensor: Any) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _require_small(model_class: Any, config: Any) -> None:
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class._from_config(config, attn_implementation="eager").parameters())
    except (NotImplementedError, RuntimeError):
        return  # Some models cannot be made without memory; they are small or the machine says so.
    if size > _MAX_PARAMETERS:
        raise ValueError(f"too large to be tiny: {size / 1e6:.0f} million parameters")
