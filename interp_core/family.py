"""What the modelling code of a family does and its configuration does not say: the record of it.

:mod:`interp_core.families` holds one for each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import field, frozen

from interp_core.contributions import Contributions
from interp_core.converters import as_frozenset, as_tuple

__all__ = ["UNKNOWN_FAMILY", "Absence", "FamilyFacts"]


@frozen
class Absence:
    """Points that blocks of some kinds lack, for a reason of the family's own.

    Attributes:
        points: their names.
        why: the reason, as a refusal says it.
        mixers: kinds of the mixer that they are absent with; empty for all.
        mlp: kind of MLP that they are absent with; empty for all.
    """

    points: tuple[str, ...] = field(converter=as_tuple)
    why: str
    mixers: frozenset[str] = field(default=frozenset(), converter=as_frozenset)
    mlp: str = ""


@frozen(kw_only=True)
class FamilyFacts:
    """One family. The defaults are the conventional decoder: sequential, RMS pre-norms, rotary, gated MLP.

    Attributes:
        n_layers_key: configuration key of the number of blocks, where the usual ones count something else.
        norm: ``rms`` or ``layer``; empty to tell by the key of the epsilon.
        norm_eps: epsilon that the code fixes; ``None`` if the configuration states it.
        attn_pre_norm, attn_post_norm, mlp_pre_norm, mlp_post_norm, final_norm: as in ``ModelFacts``.
        norm_on_sum: a block normalises each sum of residual and contribution, in place of any norm above.
        adds_residual: ``attn``, ``mlp``: sublayers whose module returns its output plus the residual.
        qk_norm: kind of the query and key norms, ``""``, ``head`` or ``full``.
        qk_norm_key: configuration key that switches them on; empty if they are always there.
        qk_norm_shared, centred_behind, gated_behind: as in ``ModelFacts``.
        eps_behind: as in ``ModelFacts``, or the configuration key of it.
        gainless: points behind norms that have no gain, such as ``attn_in``.
        qk_norm_axes: how their tensors lie: ``positions`` ([batch, pos, heads, dim], or wider), ``heads``
            ([batch, heads, pos, dim]) or ``merged`` ([batch * pos, heads, dim]).
        gated_mlp: whether a dense MLP has a gate and a linear branch.
        shared_experts: experts that every token uses, where no key counts them.
        mlp_width_of_both: whether the stated width of the MLP counts the gate and the linear branch together.
        parallel: attention and MLP read the same residual, always.
        parallel_keys: configuration keys any of which makes the blocks parallel.
        positions: kind of position information, empty to tell by the keys; a configuration's ``alibi`` overrides it.
        final_norm_call, attn_sub_norm, mlp_sub_norm: as in ``ModelFacts``.
        activation: name of the MLP's activation function that the code fixes; empty if the configuration states it.
        activation_limits_key: configuration key of limits, one per layer, that the branches of the MLP are kept within.
        activation_names: what the code understands by a name of the configuration, where that is not what it says.
        positions_behind_pad: positions are counted from behind the padding token's id, which leaves so many fewer.
        windows: which layers slide: ``typed`` (by the configuration's layer types), ``all`` (every layer, if a
            window is set), ``none`` (the code reads no window, whatever the configuration says), or ``auto``
            (``typed`` where there are types, else ``all``), which is for families without a row.
        embedding_root: the embeddings are multiplied by ``sqrt(d_model)``.
        embedding_root_key: configuration key that switches this on; empty if it is always done.
        embedding_scale_inside: whether that factor is applied inside the embedding module.
        halved_every_key: configuration key of the number of blocks after each of which the residual is halved.
        residual_depth_key: configuration key of a factor on each sublayer's contribution that is divided by the root
            of the number of layers.
        head_divisor_key: configuration key of a divisor of the final norm's output.
        embedding_norm, embedding_types: as in ``ModelFacts``.
        embedding_norm_key: configuration key that switches that norm on; empty if it is always there.
        embedding_width_key: configuration key of the embeddings' width, where a projection may follow them.
        head_transform: as in ``ModelFacts``.
        ties: whether the code ties the unembedding to the embeddings where the configuration says so.
        logit_multiplier_keys: configuration keys of a factor on the logits.
        logit_divisor_keys: configuration keys of a divisor of the logits.
        attn_scale: factor on query-key products that the code fixes.
        attn_softcap, final_softcap: whether the code applies the cap of the configuration: some store one that
            they never use.
        yarn_scale: a rotary embedding of the kind ``yarn`` brings a factor on query-key products along.
        score_terms: as in ``ModelFacts``.
        key_budget_key, key_block_key: configuration keys of ``LayerFacts.key_budget`` and ``key_block``.
        key_budget_kind: kind of the layers that these are for; empty for all.
        masked_names: a configuration key of a mapping from names to tokens, and the beginning of the names of those
            whose logits the code replaces by the lowest number.
        attn_difference: as in ``ModelFacts``.
        sinks: attention has sink logits.
        sliding_sinks: only sliding layers have them.
        sliding_kv_factor: how many times the stated key/value heads a sliding layer has.
        value_scale_key, value_clip_key: configuration keys of a factor on, and a bound of, the value projection.
        attn_gate: ``""``, ``packed``, ``separate`` or ``per_head``, as in ``ModelFacts``.
        attn_gate_key: configuration key that chooses between a gate per element and one number per head.
        attn_gate_per_head: its values that mean the latter.
        attn_gate_activation: as in ``ModelFacts``.
        float16_overflows: activations of its published checkpoints pass the largest float16 number.
        roles: as in ``ModelFacts``.
        absent: points that the code has not, each with the mechanical reason.
        causal: as in ``LayerFacts``.
        causal_keys: values that configuration keys must have for the attention to be causal at all.
        refused: why no model of the family can be served, whatever its configuration says.
        one_of: configuration keys that must say 1 for it to read one token for each position, with what they count.
        needs: configuration keys without which it does not run on tokens alone, each with what it says.
        requires: values that configuration keys must have for the row to hold.
        equal_keys: pairs of configuration keys whose values must be equal for the row to hold.
        otherwise: the row of the form for which they do not.
        contributions: as in ``ModelFacts``.
        second_mixer: kind of a token mixer beside the first one, in every block.
        rotary_if: a configuration key and the value without which no positions are given; empty if there is none.
        rereads: as in ``ModelFacts``.
        embedding_rounded: the root of ``d_model`` is kept in bfloat16.
        embedding_learned: as in ``ModelFacts``.
        d_mlp_keys: configuration keys of a dense MLP's width, looked for before the usual ones.
        attn_scale_of: factor on query-key products by the head's width, where it is not its inverse root.
        first_norms: norms of the first block, where they are not the trunk's.
        mixer_norms: norms of the blocks of a kind of mixer, where they are not the trunk's.
        factor_keys: configuration keys of ``LayerFacts.factors``; by mixer, where they differ. ``key.0`` is an element.
        absent_in: points that blocks of some kinds have not.
    """

    n_layers_key: str = ""
    norm: str = "rms"
    norm_eps: float | None = None
    attn_pre_norm: bool = True
    attn_post_norm: bool = False
    mlp_pre_norm: bool = True
    mlp_post_norm: bool = False
    final_norm: bool = True
    norm_on_sum: bool = False
    adds_residual: tuple[str, ...] = ()
    qk_norm: str = ""
    qk_norm_key: str = ""
    gainless: tuple[str, ...] = ()
    qk_norm_axes: str = "positions"
    qk_norm_shared: bool = False
    eps_behind: Mapping[str, float | str] = field(factory=dict)
    centred_behind: tuple[str, ...] = ()
    gated_behind: tuple[str, ...] = ()
    gated_mlp: bool = True
    shared_experts: int = 0
    mlp_width_of_both: bool = False
    parallel: bool = False
    parallel_keys: tuple[str, ...] = ()
    positions: str = "rotary"
    final_norm_call: int = 0
    attn_sub_norm: bool = False
    mlp_sub_norm: bool = False
    activation: str = ""
    activation_limits_key: str = ""
    activation_names: Mapping[str, str] = field(factory=dict)
    positions_behind_pad: bool = False
    windows: str = "none"
    embedding_root: bool = False
    embedding_root_key: str = ""
    embedding_scale_inside: bool = True
    halved_every_key: str = ""
    residual_depth_key: str = ""
    head_divisor_key: str = ""
    embedding_norm: bool = False
    embedding_norm_key: str = ""
    embedding_types: bool = False
    embedding_width_key: str = ""
    head_transform: bool = False
    ties: bool = True
    logit_multiplier_keys: tuple[str, ...] = ()
    logit_divisor_keys: tuple[str, ...] = ()
    attn_scale: float | None = None
    attn_softcap: bool = False
    final_softcap: bool = False
    yarn_scale: bool = False
    score_terms: str = ""
    key_budget_key: str = ""
    key_block_key: str = ""
    key_budget_kind: str = ""
    masked_names: tuple[str, str] | None = None
    attn_difference: bool = False
    sinks: bool = False
    sliding_sinks: bool = False
    sliding_kv_factor: int = 1
    value_scale_key: str = ""
    value_clip_key: str = ""
    attn_gate: str = ""
    attn_gate_key: str = ""
    attn_gate_per_head: tuple[Any, ...] = ()
    attn_gate_activation: str = "sigmoid"
    float16_overflows: bool = False
    roles: Mapping[str, str] = field(factory=dict)
    absent: Mapping[str, str] = field(factory=dict)
    causal: bool = True
    causal_keys: Mapping[str, Any] = field(factory=dict)
    refused: str = ""
    one_of: Mapping[str, str] = field(factory=dict)
    needs: Mapping[str, str] = field(factory=dict)
    requires: Mapping[str, Any] = field(factory=dict)
    equal_keys: tuple[tuple[str, str], ...] = ()
    otherwise: FamilyFacts | None = None
    contributions: Contributions = Contributions()
    second_mixer: str = ""
    rotary_if: tuple[str, Any] | None = None
    rereads: bool = False
    embedding_rounded: bool = False
    embedding_learned: bool = False
    d_mlp_keys: tuple[str, ...] = ()
    attn_scale_of: Callable[[int], float] | None = None
    first_norms: tuple[str, ...] | None = None
    mixer_norms: Mapping[str, tuple[str, ...]] = field(factory=dict)
    factor_keys: Mapping[str, str | Mapping[str, str]] = field(factory=dict)
    absent_in: tuple[Absence, ...] = ()


UNKNOWN_FAMILY: Final = FamilyFacts(
    norm="",
    parallel_keys=("use_parallel_residual", "parallel_attn", "parallel_residual"),
    positions="",
    windows="auto",
    embedding_scale_inside=False,
    logit_multiplier_keys=("logit_scale", "lm_head_multiplier", "output_multiplier"),
    logit_divisor_keys=("logits_scaling",),
    attn_softcap=True,
    final_softcap=True,
)
"""How a configuration without a row is read: whatever the usual keys say, and no claim about structure."""
