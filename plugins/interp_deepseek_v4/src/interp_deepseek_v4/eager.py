"""Bindings for the eager backend: where the tensors of each trunk are in transformers' modules (version 5.19)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interp_core.expressions import Derived, Place, Read
from interp_deepseek_v4.altup import AltUpTrunk
from interp_deepseek_v4.hyper import Connection, HyperTrunk

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deepseek_v4", "gemma3n", "glm5_next", "hy_v4", "qwen4_exp"]


def rotated_key(rows: Tensor, place: Place) -> Tensor:
    """Normed keys ``[batch, pos, head_dim]`` after the rotation, which is what attention reads as key and as value."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    attention: Any = place.module("attn")
    cos, sin = place.module("rotary")(rows, position_ids=place.positions, layer_type=attention.rope_layer_type)
    found: Tensor = apply_rotary_pos_emb(rows.unsqueeze(1), cos, sin)
    return found.squeeze(1)


class DeepseekV4Trunk(HyperTrunk):
    """Hyper-connections, and the trunk's rotary embedding for the values."""

    def layout(self, model: Any, facts: Any) -> Any:
        """As any trunk of hyper-connections; the trunk's own rotary embedding beside."""
        found = super().layout(model, facts)
        found.trunk["rotary"] = next(
            module for path, module in model.named_modules() if path.endswith("rotary_emb") and ".layers." not in path
        )
        return found


_LAST_COLLAPSES: Final = (
    Connection(module="attn_hc", write=0, mix=1, collapse=2),
    Connection(module="ffn_hc", write=0, mix=1, collapse=2),
)

_ROUTER: Final = {"mlp.router": "mlp.gate"}
_ROUTING: Final = {
    "router_logits": Read("mlp.router", slot=0),
    "expert_weights": Read("mlp.router", slot=1),
    "expert_indices": Read("mlp.router", slot=2),
}

deepseek_v4: Final = DeepseekV4Trunk(
    attn=_LAST_COLLAPSES[0],
    mlp=_LAST_COLLAPSES[1],
    contraction="hc_head",
    roles={
        "attn.z_proj": "self_attn.o_a_proj",
        "attn.o_proj": "self_attn.o_b_proj",
        "attn.q_norm": "self_attn.q_b_norm",
        "attn.k_norm": "self_attn.kv_norm",
        **_ROUTER,
    },
    points={
        # The query norm sees heads before positions; the output projection is grouped, and reads rows of all heads.
        "q_norm_in": Read("attn.q_norm", "input", heads_first=True),
        "q_norm_out": Read("attn.q_norm", heads_first=True),
        "k_norm_in": Read("attn.k_norm", "input"),
        "k_norm_out": Read("attn.k_norm"),
        "value": Derived((Read("attn.k_norm"),), rotated_key),
        "z": Read("attn.z_proj", "input"),
        **_ROUTING,
    },
)

glm5_next: Final = HyperTrunk(
    attn=_LAST_COLLAPSES[0], mlp=_LAST_COLLAPSES[1], contraction="hc_head", roles=_ROUTER, points=_ROUTING
)

hy_v4: Final = HyperTrunk(
    attn=Connection(module="attn_hc", write=0, collapse=1),
    mlp=Connection(module="ffn_hc", write=0, collapse=1),
    contraction="hc_head",
    roles=_ROUTER,
    points=_ROUTING,
)

qwen4_exp: Final = HyperTrunk(
    attn=Connection(module="attn_hyper_connection", collapse=0, write=2),
    mlp=Connection(module="mlp_hyper_connection", collapse=0, write=2),
    contraction="hyper_connection_mixer",
    flat=True,
    points=_ROUTING,
    roles={"attn": "linear_attn", **_ROUTER},  # Where a block has it; the others have attention under its usual name.
)

gemma3n: Final = AltUpTrunk()
