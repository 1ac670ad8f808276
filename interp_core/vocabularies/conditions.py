"""The facts of a model that decide what a name of another library means there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from interp_core.facts import LayerFacts, ModelFacts
from interp_core.vocabularies.records import Condition

__all__ = ["CONDITIONS"]

# Families whose blocks hold the two projections of the MLP themselves.
_NO_MLP_MODULE: Final = frozenset({"opt", "xglm", "biogpt"})


def _condition(where: str, fails: str, holds: Callable[[ModelFacts], bool]) -> Condition:
    return Condition(where=where, fails=fails, holds=lambda facts, layer: holds(facts))


def _of_layer(where: str, fails: str, holds: Callable[[LayerFacts], bool]) -> Condition:
    return Condition(where=where, fails=fails, holds=lambda facts, layer: layer is None or holds(layer))


_TABLE: Final[dict[str, Condition]] = {
    "attn_post_norm": _condition(
        "attention's output is normed before it is added",
        "this family does not norm attention's output",
        lambda facts: facts.attn_post_norm,
    ),
    "no_attn_post_norm": _condition(
        "attention's output is added as it is",
        "this family norms attention's output before it is added to the residual",
        lambda facts: not facts.attn_post_norm,
    ),
    "mlp_post_norm": _condition(
        "the MLP's output is normed before it is added",
        "this family does not norm the MLP's output",
        lambda facts: facts.mlp_post_norm,
    ),
    "no_mlp_post_norm": _condition(
        "the MLP's output is added as it is",
        "this family norms the MLP's output before it is added to the residual",
        lambda facts: not facts.mlp_post_norm,
    ),
    "attn_pre_norm": _condition(
        "a norm stands before attention",
        "this family has no norm before attention",
        lambda facts: facts.attn_pre_norm,
    ),
    "mlp_pre_norm": _condition(
        "a norm stands before the MLP", "this family has no norm before the MLP", lambda facts: facts.mlp_pre_norm
    ),
    "no_mlp_pre_norm": _condition(
        "no norm stands before the MLP",
        "in this family a norm stands between the residual and the MLP",
        lambda facts: not facts.mlp_pre_norm,
    ),
    "unscaled": _condition(
        "sublayers are added without a multiplier",
        "this family multiplies what a sublayer adds to the residual, outside any module",
        lambda facts: facts.residual_multiplier == 1.0,
    ),
    "scaled": _condition(
        "sublayers are multiplied before they are added",
        "this family adds sublayers as they are",
        lambda facts: facts.residual_multiplier != 1.0,
    ),
    "qk_norm": _condition(
        "a norm follows the query and key projections",
        "a projection before rotary embedding is a point only where a query or key norm reads it",
        lambda facts: bool(facts.qk_norm) and facts.attn_gate != "packed",
    ),
    "gated": _condition("the MLP is gated", "this family's MLP has no gate", lambda facts: facts.gated_mlp),
    "ungated": _condition("the MLP has no gate", "this family's MLP is gated", lambda facts: not facts.gated_mlp),
    "bare_logits": _condition(
        "logits have no softcap and no multiplier",
        "this family multiplies or caps what the unembedding gives, and the point is taken before that",
        lambda facts: facts.final_softcap is None and facts.logit_multiplier == 1.0,
    ),
    "separate_gate": _condition(
        "the attention gate is a projection of its own",
        "the gate of this family is packed into the query projection, and their point is the whole projection",
        lambda facts: facts.attn_gate == "separate",
    ),
    "one_stream": _condition(
        "the trunk has one residual stream",
        "this trunk carries several residual streams",
        lambda facts: facts.n_streams == 1,
    ),
    "streams": _condition(
        "the trunk has several residual streams",
        "this trunk has one residual stream",
        lambda facts: facts.n_streams > 1,
    ),
    "mlp_module": _condition(
        "the MLP is a module",
        "the blocks of this family hold the projections of the MLP themselves, and have no module for it",
        lambda facts: facts.model_type not in _NO_MLP_MODULE,
    ),
    "dense": _of_layer("the layer is dense", "this layer is a mixture of experts", lambda layer: layer.mlp == "dense"),
    "parallel": _of_layer(
        "attention and MLP run in parallel", "attention and MLP follow each other here", lambda layer: layer.parallel
    ),
}

CONDITIONS: Final[Mapping[str, Condition]] = MappingProxyType(_TABLE)
"""By the key that rows use."""
