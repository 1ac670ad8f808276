"""A transformers model that is in memory already: run as it is, without a copy, and left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from interp_core.backend import Adoption
from interp_core.errors import RequestError
from interp_core.facts import ModelFacts
from interp_core.profile import ModelProfile
from interp_eager.backend import EagerBackend
from interp_eager.compiled import refuse_compiled
from interp_eager.training import refuse_dropout

__all__ = ["adopt"]


def adopt(model: Any) -> Adoption:
    """Describe a transformers model in memory.

    Raises:
        RequestError: it is no transformers model, is compiled or has a part that is, or is in training mode with
            dropout in it.
    """
    if isinstance(model, nn.Module):
        refuse_compiled(model)
    if not isinstance(model, nn.Module) or not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise RequestError(
            f"a model is a folder, an id on the hub, or a transformers model in memory, not {type(model).__name__}"
        )
    refuse_dropout(model)

    def make(profile: ModelProfile, options: Mapping[str, Any]) -> EagerBackend:
        _check_attention(model, profile.facts)
        return EagerBackend(profile, options, model=model)

    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return Adoption(model_id=str(name), config=model.config, options=_as_it_is(model), make=make)


def _as_it_is(model: nn.Module) -> dict[str, Any]:
    weights = [p for p in model.parameters() if p.is_floating_point()]
    devices = {str(p.device) for p in model.parameters()}
    return {
        "dtype": weights[0].dtype if weights else torch.get_default_dtype(),
        "device": devices.pop() if len(devices) == 1 else None,
        "requires_grad": any(p.requires_grad for p in weights),
    }


def _check_attention(model: Any, facts: ModelFacts) -> None:
    implementation = getattr(model.config, "_attn_implementation", None)
    if facts.attn_softcap is not None and implementation not in (None, "eager"):
        raise RequestError(
            f"this model runs attn_implementation={implementation!r}, which drops its family's attention softcap: "
            "model.set_attn_implementation('eager')"
        )
