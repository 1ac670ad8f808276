"""How the mixtures of experts of each family choose and mix: what the modelling code does and no configuration says.

Every row was read off the modelling source of transformers 5.19. Routers return their logits, the weights and the
indices in different orders, or the logits alone; what is certain is what the experts are given. A family without a row
has its points in the usual places, and nothing is claimed of how its weights come from its logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, field, frozen

from interp_core.facts_config import ConfigView

__all__ = ["Routing", "read_routing"]


@frozen(kw_only=True)
class Routing:
    """The mixtures of experts of one trunk.

    Attributes:
        logits_slot: place of the logits among what the router returns.
        logits_module: path within the router of the linear map that gives the logits, where the choice is made from
            its output (``.``: the router itself). Empty where the router returns logits, weights and indices at once,
            so that a change of the logits would come too late.
        indices_slot, weights_slot: places of the chosen experts and of their weights among what the experts are given.
        factor: constant that the sum over the experts is multiplied with, behind the experts.
        chosen_slot: place, among what the router returns, of every expert's factor, 0 where it was not chosen; ``None``
            where the experts are given indices and weights.
        scores: what weights are made from: ``softmax`` or ``sigmoid`` of the logits, or ``in turn``: each choice is a
            softmax over what the earlier ones left, as far as it is near enough to the largest. Empty if that is not
            known.
        nearness: how near that is: half the largest distance from the largest, relative to it.
        shares: whether weights are shares of the sum of the chosen experts' scores, rather than the scores as they are.
        scale: constant that the router multiplies the weights with.
        learned: what of the weights is a parameter of the checkpoint, so that logits and configuration do not give it:
            ``token`` (a factor on all of a token's weights) or ``expert`` (one for each expert); empty for nothing.
        ranked: whether the chosen experts are those with the largest logits: no bias and no group has a say.
    """

    logits_slot: int = 0
    logits_module: str = ""
    indices_slot: int = 1
    weights_slot: int = 2
    factor: float = 1.0
    chosen_slot: int | None = None
    scores: str = ""
    nearness: float = 0.0
    shares: bool = True
    scale: float = 1.0
    learned: str = ""
    ranked: bool = False


@frozen(kw_only=True)
class _Row:
    """One family: its routing, and the configuration's keys that change it.

    Attributes:
        routing: what does not depend on the configuration.
        scores_key: key that names the scores.
        shares_key: key that says whether the weights are shares of their sum, where scores are what ``shares_if`` says.
        shares_if: the scores for which the code reads that key; empty for all.
        scale_key, factor_key, nearness_key: keys of the three constants.
        average_key: key whose value ``average`` halves the sum over the experts, where there are shared ones too.
        requires: values that keys must have for what is claimed of the weights to hold.
    """

    routing: Routing
    scores_key: str = ""
    shares_key: str = ""
    shares_if: str = ""
    scale_key: str = ""
    factor_key: str = ""
    average_key: str = ""
    nearness_key: str = ""
    requires: Mapping[str, Any] = field(factory=dict)


_SOFTMAX: Final = Routing(scores="softmax", ranked=True)
_SIGMOID: Final = Routing(scores="sigmoid")

_MIXTRAL: Final = _Row(routing=_SOFTMAX)
_QWEN: Final = _Row(routing=_SOFTMAX, shares_key="norm_topk_prob")
_GRANITE: Final = _Row(routing=evolve(_SOFTMAX, logits_slot=2))
_BIASED: Final = _Row(routing=_SIGMOID, shares_key="norm_topk_prob", scale_key="routed_scaling_factor")

_TABLE: Final[Mapping[str, _Row]] = {
    # A softmax over all experts, and the largest of them
    **dict.fromkeys(("mixtral", "gpt_oss", "qwen3_5_moe_text", "qwen3_vl_moe_text"), _MIXTRAL),
    **dict.fromkeys("qwen2_moe qwen3_moe qwen3_next olmoe flex_olmo mellum".split(), _QWEN),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid", "aria_text"), _GRANITE),
    "granitemoe_swa": _MIXTRAL,
    "hunyuan_v1_moe": _Row(routing=evolve(_SOFTMAX, logits_module="wg")),
    "dbrx": _Row(
        routing=evolve(_SOFTMAX, logits_module="layer"), requires={"ffn_config.moe_normalize_expert_weights": 1.0}
    ),
    "cohere2_moe": _Row(
        routing=Routing(ranked=True),
        scores_key="expert_selection_fn",
        shares_key="norm_topk_prob",
        shares_if="sigmoid",
        average_key="shared_expert_combination_strategy",
    ),
    "phimoe": _Row(routing=Routing(scores="in turn", shares=False, ranked=True), nearness_key="router_jitter_noise"),
    # Every expert gets every token, times a score that is 0 where the expert was not chosen
    "llama4_text": _Row(routing=Routing(logits_slot=1, chosen_slot=0, ranked=True)),
    # Groups of experts, and a softmax
    "deepseek_v2": _Row(routing=Routing(scores="softmax", shares=False), scale_key="routed_scaling_factor"),
    "mistral4": _Row(routing=Routing(scores="softmax"), shares_key="norm_topk_prob", scale_key="routed_scaling_factor"),
    "gemma4_text": _Row(routing=evolve(_SOFTMAX, logits_module="proj", learned="expert")),
    "deepseek_ocr2_text": _Row(
        routing=evolve(_SOFTMAX, shares=False), scale_key="routed_scaling_factor", requires={"topk_method": "greedy"}
    ),
    "ernie4_5_moe": _Row(routing=evolve(_SOFTMAX, ranked=False)),
    "jamba": _Row(routing=evolve(_SOFTMAX, logits_module=".", shares=False)),
    # A sigmoid, and a bias that only the choice sees
    **dict.fromkeys(
        "axk1 axk2 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa "
        "kimi_linear lfm2_moe mimo_v2_flash nemotron_h solar_open".split(),
        _BIASED,
    ),
    "minimax_m2": _Row(routing=_SIGMOID),
    "hy_v3": _Row(routing=_SIGMOID, scale_key="router_scaling_factor"),
    "laguna": _Row(routing=_SIGMOID, factor_key="moe_routed_scaling_factor"),
    "minimax_m3_vl_text": _Row(routing=_SIGMOID, factor_key="routed_scaling_factor"),
    # Shares of a sum that shared experts are in too, times a number of the checkpoint
    "inkling_text": _Row(routing=evolve(_SIGMOID, learned="token")),
    "afmoe": _Row(routing=evolve(_SIGMOID, logits_module="gate"), scale_key="route_scale"),
}


def read_routing(model_type: str, view: ConfigView) -> Routing:
    """How the mixtures of experts of a trunk choose and mix.

    Args:
        model_type: of the trunk's own configuration.
        view: that configuration.
    """
    row = _TABLE.get(model_type)
    if row is None:
        return Routing()
    scores = str(view.get(row.scores_key) or "") if row.scores_key else row.routing.scores
    if any(view.get(name) != value for name, value in row.requires.items()):
        scores = ""
    shares = row.routing.shares
    if row.shares_key and row.shares_if in ("", scores):
        shares = view.flag(row.shares_key)
    averaged = bool(row.average_key) and view.get(row.average_key) == "average" and view.flag("num_shared_experts")
    return evolve(
        row.routing,
        scores=scores,
        shares=shares,
        scale=_constant(view, row.scale_key),
        nearness=_constant(view, row.nearness_key),
        factor=0.5 if averaged else _constant(view, row.factor_key),
    )


def _constant(view: ConfigView, key: str) -> float:
    stated = view.number(key) if key else None
    return 1.0 if stated is None else stated
