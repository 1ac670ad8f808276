"""AltUp (alternating updates): one update of all streams around both sublayers of a block.

The block predicts all streams from themselves (``mix``), runs attention and MLP on one of them, the *active* one, and
corrects every stream by what that one gained, times a weight of its own (``write``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from interp_core.address import Address
from interp_core.expressions import Binding, Derived, Expression, Place, Read
from interp_core.facts import ModelFacts
from interp_core.trunk import Trunk

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.layout import Layout

__all__ = ["AltUpTrunk"]

_SMALLEST: Final = 1e-5
"""The least squared magnitude that transformers divides by, in matching magnitudes."""


def predicted_mix(rows: Tensor, place: Place) -> Tensor:
    """``[..., streams ** 2]`` coefficients of the prediction as a matrix: streams are kept, and added to."""
    streams = round(rows.shape[-1] ** 0.5)
    return rows + torch.eye(streams, dtype=rows.dtype, device=rows.device).flatten()


def correction_weights(rows: Tensor, place: Place) -> Tensor:
    """Coefficients of the correction as weights of what the active stream gained: 1, and more or less."""
    return rows + 1.0


_POINTS: Final[Mapping[str, Expression]] = {
    "resid_streams": Read("block", streams_first=True),
    "resid_post": Read("block", streams_first=True),
    "resid_pre": Read("block", "input", streams_first=True),
    "attn_stream_collapse": Read("attn_pre_norm", "input"),
    "attn_stream_mix": Derived((Read("altup.prediction"),), predicted_mix),
    "mlp_stream_write": Derived((Read("altup.correction"),), correction_weights),
    "attn_in": Read("attn", "input"),
    "attn_out": Read("attn"),
    "mlp_in": Read("mlp", "input"),
    "mlp_out": Read("mlp"),
}


class AltUpTrunk(Trunk):
    """Gemma 3n's trunk in transformers, whose stacks are ``[streams, batch, pos, d_model]``."""

    def layout(self, model: Any, facts: ModelFacts) -> Layout:
        """The conventional parts, and AltUp's two projections."""
        found = super().layout(model, facts)
        for roles in found.blocks:
            block: Any = roles["block"]
            roles["attn_pre_norm"] = block.input_layernorm
            attention = block.self_attn
            roles["attn.q_norm"] = attention.q_norm
            if not attention.is_kv_shared_layer:
                roles |= {"attn.k_norm": attention.k_norm, "attn.v_norm": attention.v_norm}
            roles["altup.prediction"] = block.altup.prediction_coefs
            roles["altup.correction"] = block.altup.correction_coefs
        found.trunk["contraction"] = next(
            module for module in model.modules() if hasattr(module, "altup_unembed_projections")
        )
        return found

    def bind(self, address: Address, facts: ModelFacts, layout: Layout) -> Binding:
        """AltUp's points, then what is conventional."""
        own = _POINTS.get(address.name)
        return Binding(own) if own is not None else super().bind(address, facts, layout)

    def contract(self, stack: Tensor, layout: Layout) -> Tensor:
        """The mean of all streams, each but the first projected and brought to the first one's magnitude."""
        trunk: Any = layout.trunk["contraction"]
        first, *others = stack.unbind(dim=-2)
        magnitude = first.square().mean(dim=-1, keepdim=True).sqrt()
        rows = [first]
        for projection, stream in zip(trunk.altup_unembed_projections, others, strict=True):
            projected = projection(stream)
            own = projected.square().mean(dim=-1, keepdim=True).clamp_min(_SMALLEST).sqrt()
            rows.append(projected * magnitude / own)
        return torch.stack(rows).mean(dim=0)
