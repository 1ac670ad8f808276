"""What the modelling code of a family does and its configuration does not say: data, one row per trunk.

Every row was read off the modelling source of transformers 5.19. A family without a row has its dimensions
read all the same, and its layer points refused: a guess here would be a right shape with a wrong tensor.
Left out on purpose: trunks with several residual streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve, field, frozen

from interp_core.contributions import Contributions, Weights
from interp_core.converters import as_frozenset, as_tuple

__all__ = ["BARE_HEADS", "FAMILIES", "SCALED_HEADS", "UNKNOWN_FAMILY", "Absence", "FamilyFacts"]


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

# Bases. A row is a base, or a base with what differs.
_LLAMA: Final = FamilyFacts()
_TYPED: Final = FamilyFacts(windows="typed")
_SLIDING: Final = FamilyFacts(windows="all")
_GEMMA: Final = FamilyFacts(embedding_root=True)
_POST_NORM: Final = FamilyFacts(attn_pre_norm=False, attn_post_norm=True, mlp_pre_norm=False, mlp_post_norm=True)
_SANDWICH: Final = FamilyFacts(attn_post_norm=True, mlp_post_norm=True)
_LAYER_NORM: Final = FamilyFacts(norm="layer", gated_mlp=False)
_COHERE: Final = FamilyFacts(norm="layer", parallel=True, logit_multiplier_keys=("logit_scale",))
_GRANITE: Final = FamilyFacts(embedding_scale_inside=False, logit_divisor_keys=("logits_scaling",))
_HYPERCLOVAX: Final = evolve(_GRANITE, logit_divisor_keys=(), logit_multiplier_keys=("logits_scaling",))
_GPT2: Final = evolve(_LAYER_NORM, positions="learned")
_POST_LN: Final = evolve(
    _GPT2, attn_pre_norm=False, mlp_pre_norm=False, norm_on_sum=True, final_norm=False, norm_eps=1e-5
)
_BART: Final = evolve(_POST_LN, embedding_root=True, embedding_root_key="scale_embedding", embedding_norm=True)
_MBART: Final = evolve(_GPT2, embedding_root=True, embedding_root_key="scale_embedding", norm_eps=1e-5)
_MUSICGEN: Final = evolve(
    _MBART,
    positions="other",
    embedding_root=False,
    ties=False,
    one_of={"num_codebooks": "rows of audio codes for each position, in place of one token"},
)
# Sublayers of these are spread over modules that also hold the residual and its norms.
_BERT_ROLES: Final = {
    "attn": "attention.self",
    "attn.v_proj": "attention.self.value",
    "attn.o_proj": "attention.output.dense",
    "attn_sum_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_sum_norm": "output.LayerNorm",
}
_BERT: Final = evolve(
    _POST_LN,
    norm_eps=None,
    adds_residual=("attn", "mlp"),
    embedding_norm=True,
    embedding_types=True,
    head_transform=True,
    roles=_BERT_ROLES,
    causal_keys={"is_decoder": True},
    requires={"chunk_size_feed_forward": 0},
)
_ROBERTA: Final = evolve(_BERT, positions_behind_pad=True)
_BERT_PRE_NORMS: Final = evolve(_BERT, attn_pre_norm=True, mlp_pre_norm=True, norm_on_sum=False, final_norm=True)
_ADAPTER: Final = "an adapter of its own residual and norms stands between what the MLP adds and the block's output"
_MAMBA: Final = FamilyFacts(windows="typed", mlp_pre_norm=False, positions="none")
_GATED_HYBRID: Final = evolve(_TYPED, qk_norm="head", attn_gate="packed")
_LATENT: Final = FamilyFacts(yarn_scale=True)
_INSIDE: Final = tuple(
    "attn_in value attn_scores attn_probs z attn_out attn_out_post resid_mid mlp_in mlp_pre mlp_pre_linear mlp_act "
    "router_logits expert_weights expert_indices mlp_out mlp_out_post".split()
)
_TWO_HALVES: Final = (
    "each block of this family has two attentions, two MLPs, and experts that read in the first half and add to the "
    "second, so there is no one such tensor; on eager path.<module> reads any of them"
)
_AFTER_ROTARY: Final = "queries and keys are normalised after the rotary embedding here, and this point is before it"
_NORMS_AFTER_ROTARY: Final = dict.fromkeys(("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"), _AFTER_ROTARY)
_MIXED_AT_THE_INPUT: Final = {
    "expert_weights": "this family multiplies what the chosen experts read, and adds up what they give as it is: "
    "nothing is weighted behind them; router_logits, through a sigmoid, are the factors"
}
_QK_NORMS: Final = ("q_norm_out", "k_norm_out")
_CHAMELEON: Final = FamilyFacts(
    qk_norm="head",
    qk_norm_axes="merged",
    eps_behind=dict.fromkeys(_QK_NORMS, 1e-5),
    centred_behind=_QK_NORMS,
    masked_names=("vocabulary_map", "IMGIMG"),
)
_POSITION_FACTOR: Final = "a factor on queries that grows with their position"
_ALONE: Final = FamilyFacts(windows="typed", positions="none", gated_mlp=False)
# One transformer block, whose parameters several blocks share, feeds the state space of each of them.
_FEEDS: Final = "attention and MLP of this block feed its state space, which alone is added to the residual"
_SHARED_BLOCK: Final = FamilyFacts(
    windows="typed",
    positions="none",
    attn_scale_of=lambda width: (width / 2) ** -0.5,
    contributions=Contributions(attn_terms=("attn.fed",), mlp_reads="attn_out"),
    roles={
        "attn": "shared_transf.self_attn shared_transformer.self_attn mamba",
        "attn.fed": "mamba_decoder.mamba",
        "attn.v_adapter": "shared_transformer.self_attn.linear_v_adapter_list.{turn}",
        "mlp": "shared_transf.feed_forward shared_transformer.feed_forward",
        "mlp.gate_up_adapter": "shared_transformer.feed_forward.gate_up_proj_adapter_list.{turn}",
    },
    absent_in=(
        Absence(["mlp_out_post"], _FEEDS, {"hybrid"}),
        Absence(["resid_mid"], f"{_FEEDS}, so nothing lies between them", {"hybrid"}),
        Absence(
            ["attn_in"],
            "attention of this block reads the residual and the embeddings side by side, which is twice as wide",
            {"hybrid"},
        ),
    ),
)
_PROMPT_SLOTS: Final = "rows stand for the slots of a learned prompt first, and only then for the tokens"
_GEMMA4: Final = evolve(
    _GEMMA,
    attn_post_norm=True,
    mlp_post_norm=True,
    windows="typed",
    qk_norm="head",
    final_softcap=True,
    attn_scale=1.0,
    requires={"use_bidirectional_attention": "vision"},
    # The block's output as a whole is multiplied by a weight of the checkpoint.
    contributions=Contributions(
        mlp_terms=("mlp_post_norm", "per_layer_input"),
        mlp_skip="learned",
        weights={"mlp": Weights("block", "layer_scalar"), "mlp_skip": Weights("block", "layer_scalar")},
    ),
    roles={
        "attn.v_norm": "self_attn.v_norm",
        "per_layer_input": "post_per_layer_input_norm",
        # The router and the experts stand in the block, beside the MLP.
        "mlp.router": "router",
        "mlp.router_logits": "router.proj",
        "mlp.experts": "experts",
    },
    absent_in=(
        Absence(
            ["mlp_in"],
            "the dense MLP and the experts of this block each read the residual through a norm of their own",
            mlp="sparse",
        ),
    ),
)

_TABLE: Final[dict[str, FamilyFacts]] = {
    # Llama and its kin
    "llama": _LLAMA,
    "arcee": evolve(_LLAMA, gated_mlp=False),
    "apertus": evolve(_LLAMA, gated_mlp=False, qk_norm="head", qk_norm_axes="heads"),
    "cwm": _TYPED,
    "ernie4_5": _LLAMA,
    "helium": _LLAMA,
    "ministral": _TYPED,
    "ministral3": evolve(_SLIDING, score_terms=_POSITION_FACTOR),
    "mistral": _SLIDING,
    "seed_oss": _LLAMA,
    "smollm3": _TYPED,
    "phi3": _SLIDING,
    "phi4_multimodal": _SLIDING,
    "emu3_text_model": _LLAMA,
    "evolla": _LLAMA,  # its adapters do nothing without a protein
    "mllama_text_model": _LLAMA,
    "moshi": evolve(_LLAMA, mlp_width_of_both=True, roles={"mlp.gate_up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
    "chameleon": evolve(
        _CHAMELEON,
        requires={"swin_norm": False},
        otherwise=evolve(
            _CHAMELEON,
            attn_pre_norm=False,
            attn_post_norm=True,
            mlp_pre_norm=False,
            mlp_post_norm=True,
            roles={"attn_post_norm": "input_layernorm", "mlp_post_norm": "post_attention_layernorm"},
        ),
    ),
    "cosmos3_edge_text": evolve(_LLAMA, gated_mlp=False),
    "paddleocr_vl_text": _LLAMA,
    # Qwen
    "qwen2": _TYPED,
    "qwen2_vl_text": _TYPED,
    "qwen2_5_vl_text": _TYPED,
    "qwen2_5_omni_text": _TYPED,
    "qwen3": evolve(_TYPED, qk_norm="head"),
    "qwen3_vl_text": evolve(_LLAMA, qk_norm="head"),
    "qwen3_5_text": _GATED_HYBRID,
    # Gemma. Version 3 stores an attention softcap and never passes it on; its activations pass 65504 (issue 36822 of
    # transformers).
    "gemma": _GEMMA,
    "gemma2": evolve(
        _GEMMA, attn_post_norm=True, mlp_post_norm=True, windows="typed", attn_softcap=True, final_softcap=True
    ),
    "gemma3_text": evolve(
        _GEMMA,
        attn_post_norm=True,
        mlp_post_norm=True,
        windows="typed",
        qk_norm="head",
        qk_norm_axes="heads",
        final_softcap=True,
        float16_overflows=True,
    ),
    "vaultgemma": evolve(_GEMMA, windows="typed", attn_softcap=True, final_softcap=True),
    # OLMo. The first has norms without parameters, whose epsilon the code fixes.
    "olmo": evolve(_LLAMA, norm="layer", norm_eps=1e-5, gainless=("attn_in", "mlp_in", "final_norm")),
    "olmo2": evolve(_POST_NORM, qk_norm="full"),
    "olmo3": evolve(_POST_NORM, qk_norm="full", windows="typed"),
    # Norms after the sublayer
    "exaone4": evolve(_POST_NORM, qk_norm="head", qk_norm_axes="heads", windows="typed"),
    "glm": _LLAMA,
    "glm4": _SANDWICH,
    "glm4v_text": _SANDWICH,
    "glm_ocr_text": _SANDWICH,
    "muse_glimmer_text": evolve(
        _SANDWICH,
        windows="typed",
        qk_norm="head",
        qk_norm_axes="heads",
        qk_norm_shared=True,
        gainless=_QK_NORMS,
        eps_behind=dict.fromkeys(("attn_out_post", "mlp_out_post"), "post_norm_eps"),
        attn_gate="separate",
        roles=dict.fromkeys(("attn.q_norm", "attn.k_norm"), "self_attn.qk_norm"),
        logit_multiplier_keys=("output_multiplier",),
        final_softcap=True,
    ),
    # Parallel blocks with one norm, and logits with a factor
    "cohere": evolve(_COHERE, qk_norm="head", qk_norm_key="use_qk_norm"),
    "cohere2": evolve(_COHERE, windows="typed"),
    "cohere_compass_text": evolve(_COHERE, windows="typed"),
    # Factors on the residual, embeddings and logits. One family divides the logits, the other multiplies.
    "granite": _GRANITE,
    "granite4_vision_text": _GRANITE,
    "hyperclovax": evolve(
        _HYPERCLOVAX, attn_post_norm=True, mlp_post_norm=True, requires={"use_post_norm": True}, otherwise=_HYPERCLOVAX
    ),
    # Layer norms and plain MLPs
    "gpt2": evolve(_GPT2, requires={"scale_attn_by_inverse_layer_idx": False}),
    "gpt_bigcode": _GPT2,
    "gpt_neo": evolve(_GPT2, windows="typed", attn_scale=1.0),
    "gpt_neox": evolve(_LAYER_NORM, parallel_keys=("use_parallel_residual",)),
    "gptj": evolve(_LAYER_NORM, parallel=True),
    "codegen": evolve(_LAYER_NORM, parallel=True),
    "falcon": evolve(_LAYER_NORM, parallel_keys=("parallel_attn", "new_decoder_architecture")),
    # The last block adds a bias to what attention gives.
    "gpt_neox_japanese": evolve(
        _LAYER_NORM, contributions=Contributions(weights={"attn": Weights("attn", "", "dense_bias")})
    ),
    "jais2": _LAYER_NORM,
    "nemotron": _LAYER_NORM,
    "persimmon": evolve(_LAYER_NORM, qk_norm="head", qk_norm_key="qk_layernorm"),
    "phi": evolve(_LAYER_NORM, parallel=True, qk_norm="head", qk_norm_axes="heads", qk_norm_key="qk_layernorm"),
    "starcoder2": evolve(_LAYER_NORM, windows="all"),
    "stablelm": FamilyFacts(
        norm="layer",
        parallel_keys=("use_parallel_residual",),
        qk_norm="head",
        qk_norm_axes="heads",
        qk_norm_key="qk_layernorm",
    ),
    "modernbert-decoder": FamilyFacts(
        norm="layer",
        windows="typed",
        embedding_norm=True,
        first_norms=("mlp_pre_norm",),
        head_transform=True,
        roles={"attn.o_proj": "attn.Wo", "mlp_pre_norm": "mlp_norm", "mlp.down_proj": "mlp.Wo"},
    ),
    # Two layer norms that the code builds without the configuration's epsilon
    "biogpt": evolve(_GPT2, norm_eps=1e-5, embedding_root=True, embedding_root_key="scale_embedding"),
    "kosmos_2_5_text_model": evolve(
        _LAYER_NORM,
        positions="other",
        embedding_root=True,
        embedding_root_key="scale_embedding",
        embedding_scale_inside=False,
        mlp_sub_norm=True,
    ),
    "xglm": evolve(
        _LAYER_NORM, positions="other", norm_eps=1e-5, embedding_root=True, embedding_root_key="scale_embedding"
    ),
    "opt": evolve(
        _GPT2,
        norm_eps=1e-5,
        requires={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
        equal_keys=(("word_embed_proj_dim", "hidden_size"),),
    ),
    # Queries and keys are normalised after the rotary embedding; one more norm, or a residual factor by depth
    "hunyuan_v1_dense": evolve(_LLAMA, absent=_NORMS_AFTER_ROTARY),
    "hunyuan_vl_text": evolve(_LLAMA, absent=_NORMS_AFTER_ROTARY),
    "nanochat": FamilyFacts(
        gated_mlp=False,
        gainless=("attn_in", "mlp_in", "final_norm"),
        embedding_norm=True,
        final_norm_call=1,
        final_softcap=True,
        absent=_NORMS_AFTER_ROTARY,
    ),
    "bitnet": evolve(_LLAMA, attn_sub_norm=True, mlp_sub_norm=True),
    # Two maps of attention, one less a learned share of the other
    "diffllama": evolve(_LLAMA, attn_difference=True),
    # Latent attention: keys and values of each head are expanded from one vector per token
    "youtu": _LATENT,
    "minicpm3": evolve(_LATENT, residual_depth_key="scale_depth", head_divisor_key="logits_scaling"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "axk1": _LATENT,
    "longcat_flash": evolve(_LATENT, n_layers_key="num_layers", absent=dict.fromkeys(_INSIDE, _TWO_HALVES)),
    "mistral4": evolve(_LATENT, score_terms=_POSITION_FACTOR),
    # Of the keys that a query may see, it attends to those that an indexer chooses
    "deepseek_v32": evolve(_LATENT, key_budget_key="index_topk"),
    "glm_moe_dsa": evolve(_LATENT, key_budget_key="index_topk"),
    "axk2": evolve(
        _LATENT,
        key_budget_key="index_topk",
        gated_behind=("attn_in", "mlp_in"),
        attn_gate="packed",
        roles={"attn.q_proj": "self_attn.q_gate_proj"},
    ),
    # Position biases, and modules that return their output plus the residual
    "bloom": evolve(
        _LAYER_NORM,
        activation="gelu_new",
        positions="alibi",
        adds_residual=("attn", "mlp"),
        embedding_norm=True,
        requires={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
    ),
    "mpt": evolve(
        _LAYER_NORM,
        activation="gelu",
        positions="alibi",
        adds_residual=("mlp",),
        requires={"attn_config.clip_qkv": None},
    ),
    "ctrl": evolve(
        _LAYER_NORM,
        norm_eps=1e-6,
        activation="relu",
        positions="other",
        embedding_root=True,
        embedding_scale_inside=False,
        roles={
            "attn": "multi_head_attention",
            "attn.v_proj": "multi_head_attention.Wv",
            "attn_in": "layernorm1",
            "mlp_pre_norm": "layernorm2",
            "mlp.up_proj": "ffn.0",
            "mlp.down_proj": "ffn.2",
        },
    ),
    # Norms on the sums. The first understands "gelu" as its approximation.
    "openai-gpt": evolve(_POST_LN, norm_eps=None, activation_names={"gelu": "gelu_new"}),
    "bart": _BART,
    "plbart": _BART,
    "mvp": evolve(_BART, embedding_scale_inside=False),
    "marian": evolve(_BART, positions="other", embedding_scale_inside=False, embedding_norm=False),
    "blenderbot-small": evolve(_BART, embedding_root=False),
    "trocr": evolve(_BART, embedding_norm_key="layernorm_embedding"),
    # BERT and its kin, which are decoders where their configuration says so
    "bert": _BERT,
    "ernie": _BERT,
    "roc_bert": _BERT,
    "bert-generation": evolve(_BERT, embedding_types=False, head_transform=False),
    "git": evolve(_BERT, embedding_types=False, head_transform=False, causal_keys={}),
    "big_bird": evolve(
        _BERT,
        embedding_root=True,
        embedding_root_key="rescale_embeddings",
        embedding_scale_inside=False,
        causal_keys={"is_decoder": True, "attention_type": "original_full"},
    ),
    "electra": evolve(_BERT, embedding_width_key="embedding_size"),
    "rembert": evolve(_BERT, embedding_width_key="input_embedding_size", ties=False),
    "roformer": evolve(
        _BERT,
        positions="rotary",
        embedding_width_key="embedding_size",
        requires={"chunk_size_feed_forward": 0, "rotary_value": False},
    ),
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "xmod": evolve(
        _ROBERTA,
        needs={"default_language": "through which of its adapters tokens go"},
        absent={"mlp_out_post": _ADAPTER},
        requires={"chunk_size_feed_forward": 0, "pre_norm": False},
    ),
    "megatron-bert": evolve(_BERT_PRE_NORMS, embedding_norm=False, roles={**_BERT_ROLES, "mlp_pre_norm": "ln"}),
    "roberta-prelayernorm": evolve(
        _BERT_PRE_NORMS, positions_behind_pad=True, roles={**_BERT_ROLES, "mlp_pre_norm": "intermediate.LayerNorm"}
    ),
    "xlm-roberta-xl": evolve(
        _BERT_PRE_NORMS,
        positions_behind_pad=True,
        embedding_norm=False,
        roles={**_BERT_ROLES, "mlp_pre_norm": "LayerNorm"},
    ),
    # Decoders of encoder-decoders with norms before the sublayers. Whisper states a scale that its decoder never uses.
    "mbart": evolve(_MBART, embedding_norm=True),
    "blenderbot": _MBART,
    "bigbird_pegasus": evolve(_MBART, ties=False),
    # Audio codes in place of text; of one codebook they are one sequence of tokens.
    "musicgen_decoder": _MUSICGEN,
    "musicgen_melody_decoder": _MUSICGEN,
    # Trained to see both ways. The other form, which no published checkpoint has, is not described.
    "xlnet": evolve(_POST_LN, causal_keys={"attn_type": "uni"}, requires={"attn_type": "bi"}),
    "prophetnet": evolve(
        _POST_LN,
        refused="its blocks carry several rows for each token, one for the token and one for each that it predicts "
        "ahead, so that there is no one row per position",
    ),
    "pegasus": evolve(_MBART, positions="other", embedding_scale_inside=False),
    "whisper": evolve(_MBART, embedding_root=False, embedding_root_key=""),
    # Mixtures of experts
    "mixtral": _SLIDING,
    "qwen2_moe": _TYPED,
    "qwen3_moe": evolve(_SLIDING, qk_norm="head"),
    "qwen3_vl_moe_text": evolve(_LLAMA, qk_norm="head"),
    "minimax_m3_vl_text": evolve(
        _TYPED,
        qk_norm="head",
        activation="swigluoai",
        key_budget_key="index_topk_blocks",
        key_block_key="index_block_size",
        key_budget_kind="minimax_m3_sparse",
    ),
    "step3p5": evolve(
        _TYPED,
        qk_norm="head",
        attn_gate="separate",
        attn_gate_key="gating",
        attn_gate_per_head=(True, "per-head"),
        activation_limits_key="swiglu_limits_shared",
    ),
    "qwen3_omni_moe_text": evolve(_LLAMA, qk_norm="head"),
    "qwen3_next": _GATED_HYBRID,
    "qwen3_5_moe_text": _GATED_HYBRID,
    "olmoe": evolve(_LLAMA, qk_norm="full"),
    "flex_olmo": evolve(_POST_NORM, qk_norm="full"),
    "granitemoe": _GRANITE,
    "gpt_oss": evolve(_TYPED, sinks=True),
    "phimoe": evolve(_SLIDING, norm="layer"),
    "aria_text": _LLAMA,
    "deepseek_ocr2_text": _LLAMA,
    "dots1": evolve(_TYPED, qk_norm="head"),
    "ernie4_5_moe": _LLAMA,
    "ernie4_5_vl_moe_text": evolve(
        _LLAMA, roles={"mlp.router": "mlp.text_moe.gate", "mlp.experts": "mlp.text_moe.experts"}
    ),
    "exaone_moe": evolve(_TYPED, qk_norm="head", qk_norm_axes="heads"),
    "glm4_moe": evolve(_LLAMA, qk_norm="head", qk_norm_key="use_qk_norm"),
    "glm4v_moe_text": _LLAMA,
    "mellum": evolve(_TYPED, qk_norm="head"),
    "minimax_m2": evolve(_LLAMA, qk_norm="full"),
    "solar_open": _LLAMA,
    "cohere2_moe": evolve(_COHERE, norm="", windows="typed"),
    "hunyuan_v1_moe": evolve(_LLAMA, absent=_NORMS_AFTER_ROTARY, shared_experts=1),
    "hy_v3": evolve(_LLAMA, qk_norm="head", qk_norm_axes="heads"),
    "granitemoeshared": _GRANITE,
    "granite_swa": evolve(_GRANITE, windows="typed", sinks=True),
    "granitemoe_swa": evolve(_GRANITE, windows="typed", sinks=True),
    "laguna": evolve(
        _TYPED,
        qk_norm="head",
        attn_gate="separate",
        attn_gate_key="gating",
        attn_gate_per_head=(True, "per-head"),
        attn_gate_activation="softplus",
    ),
    "mimo_v2_flash": evolve(
        _TYPED, sinks=True, sliding_sinks=True, sliding_kv_factor=2, value_scale_key="attention_value_scale"
    ),
    "llama4_text": evolve(_TYPED, absent={**_NORMS_AFTER_ROTARY, **_MIXED_AT_THE_INPUT}, score_terms=_POSITION_FACTOR),
    "dbrx": evolve(
        _LLAMA,
        norm="layer",
        norm_eps=1e-5,
        value_clip_key="attn_config.clip_qkv",
        roles={
            "attn": "norm_attn_norm.attn",
            "mlp_pre_norm": "norm_attn_norm.norm_2",
        },
    ),
    "afmoe": evolve(
        _SANDWICH,
        windows="typed",
        qk_norm="head",
        attn_gate="separate",
        embedding_root=True,
        embedding_root_key="mup_enabled",
        embedding_scale_inside=False,
    ),
    # State spaces, convolutions and attention in one trunk
    "lfm2": evolve(_TYPED, qk_norm="head"),
    "lfm2_moe": evolve(_TYPED, qk_norm="head"),
    "jamba": evolve(_TYPED, positions="none"),
    "bamba": _TYPED,
    # A recurrence in place of attention, and an MLP whose output has a gate. Its first block begins with a norm.
    "rwkv": evolve(
        _LAYER_NORM,
        positions="none",
        activation="relu2",
        embedding_norm=True,
        halved_every_key="rescale_every",
        roles={
            "block_in": "pre_ln",
            "attn.o_proj": "attention.output",
            "mlp.up_proj": "feed_forward.key",
            "mlp.down_proj": "feed_forward.value",
            "mlp_pre_norm": "ln2",
        },
    ),
    "falcon_h1": FamilyFacts(
        embedding_scale_inside=False,
        logit_multiplier_keys=("lm_head_multiplier",),
        second_mixer="state_space",
        roles={"attn.beside": "mamba"},
        contributions=Contributions(attn_terms=("attn.beside", "attn")),
        factor_keys={
            "attn.beside": "ssm_out_multiplier",
            "attn": "attention_out_multiplier",
            "mlp.gate_proj": "mlp_multipliers.0",
        },
    ),
    "granitemoehybrid": evolve(
        _GRANITE,
        windows="typed",
        positions="",
        rotary_if=("position_embedding_type", "rope"),
        d_mlp_keys=("shared_intermediate_size",),
        roles={"mlp": "block_sparse_moe shared_mlp"},
    ),
    "kimi_linear": evolve(_TYPED, positions="none"),
    "olmo_hybrid": evolve(
        _POST_NORM,
        qk_norm="full",
        windows="typed",
        positions="",
        mixer_norms={"linear_attention": ("attn_pre_norm", "mlp_pre_norm")},
    ),
    "recurrent_gemma": FamilyFacts(
        windows="typed",
        embedding_root=True,
        embedding_rounded=True,
        embedding_scale_inside=False,
        final_softcap=True,
    ),
    "zamba": _SHARED_BLOCK,
    "zamba2": evolve(_SHARED_BLOCK, positions="", rotary_if=("use_mem_rope", True)),
    # The residual that a sublayer is added to is the sublayer's own normed input, times a factor
    "minimax": evolve(
        _TYPED,
        contributions=Contributions(attn_skip="normed", mlp_skip="normed"),
        requires={"sliding_window": None},
        factor_keys={
            "attn": {"full_attention": "full_attn_beta_factor", "linear_attention": "linear_attn_beta_factor"},
            "attn_skip": {"full_attention": "full_attn_alpha_factor", "linear_attention": "linear_attn_alpha_factor"},
            "mlp": "mlp_beta_factor",
            "mlp_skip": "mlp_alpha_factor",
        },
    ),
    # Learned weights on the residual
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "doge": evolve(
        _SLIDING,
        qk_norm="head",
        score_terms="a mask that attention computes from its values",
        contributions=Contributions(
            attn_skip="learned",
            mlp_skip="learned",
            weights={
                "attn_skip": Weights("block", "input_residual"),
                "mlp_skip": Weights("block", "post_attention_residual"),
            },
        ),
        absent_in=(
            Absence(
                ["router_logits", "expert_weights", "expert_indices"],
                "experts are the pairs of two halves of a key, and no module gives a logit or a weight for each",
                mlp="sparse",
            ),
        ),
    ),
    "zaya": evolve(
        _TYPED,
        qk_norm="head",
        embedding_learned=True,
        roles={
            "attn.split": "self_attn.qkv_proj",
            "attn.qk_norm": "self_attn.qk_norm",
            "attn_join": "post_attention_residual_scale",
            "mlp_join": "post_mlp_residual_scale",
        },
        contributions=Contributions(
            attn_skip="learned",
            mlp_skip="learned",
            weights={
                "attn": Weights("attn_join", "hidden_states_scale", "hidden_states_bias"),
                "mlp": Weights("mlp_join", "hidden_states_scale", "hidden_states_bias"),
                "attn_skip": Weights("attn_join", "residual_scale", "residual_bias"),
                "mlp_skip": Weights("mlp_join", "residual_scale", "residual_bias"),
            },
        ),
    ),
    # Short convolutions behind the sublayers, and inside attention
    "inkling_text": evolve(
        _TYPED,
        qk_norm="head",
        head_divisor_key="logits_mup_width_multiplier",
        score_terms="a learned bias by distance, and a factor by position",
        attn_scale_of=lambda width: 1.0 / width,
        roles={"attn_post": "attn_sconv", "mlp_post": "mlp_sconv", "attn.v_proj": "self_attn.v_sconv"},
    ),
    # No list of blocks that each run once on the tokens of a prompt
    "hrm_text": evolve(
        _LLAMA,
        attn_gate="separate",
        embedding_scale_inside=False,
        absent={
            "layers": "two stacks run in a loop, each block several times in a forward, so it has no one tensor",
            "final_norm": "the norm behind a stack runs several times in a forward, so it has no one output",
        },
    ),
    "xlm": evolve(
        _GPT2,
        final_norm=False,
        causal_keys={"causal": True},
        absent={"layers": "the parts of a layer stand in four lists of the trunk, and no module is a block"},
    ),
    "cpmant": evolve(
        _LLAMA,
        positions="other",
        causal=False,
        rereads=True,
        absent={
            "layers": _PROMPT_SLOTS,
            "final_norm": _PROMPT_SLOTS,
            "embeddings": _PROMPT_SLOTS,
        },
    ),
    "reformer": evolve(
        _LAYER_NORM,
        positions="other",
        absent=dict.fromkeys(
            ("layers", "final_norm", "embeddings", "lm_head"),
            "each forward hashes by random rotations of its own, so that it cannot be repeated, and nothing that it "
            "computes can be held against anything; and it carries two residuals",
        ),
    ),
    # State spaces, attention, MLPs and experts, each alone in a block
    "nemotron_h": _ALONE,
    "xlstm": FamilyFacts(
        positions="none",
        final_softcap=True,
        roles={
            "attn": "mlstm_layer",
            "attn.o_proj": "mlstm_layer.out_proj",
            "mlp_pre_norm": "norm_ffn",
            "mlp.gate_proj": "ffn.proj_up_gate",
            "mlp.up_proj": "ffn.proj_up",
            "mlp.gate_up_proj": "ffn.proj_up_gate_z",
            "mlp.down_proj": "ffn.proj_down",
        },
    ),
    # State spaces alone: one sublayer per block
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "falcon_mamba": _MAMBA,
}

FAMILIES: Final[Mapping[str, FamilyFacts]] = MappingProxyType(_TABLE)
"""Facts by ``model_type`` of the trunk's own configuration."""

# A wrapper has an unembedding of its own, and most forget the factor or the cap of the text model they wrap.
BARE_HEADS: Final = frozenset(
    "audioflamingo3 aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu "
    "gemma3 glmasr got_ocr2 granite_speech granite_speech_plus idefics2 idefics3 internvl kimi_k25 lfm2_vl "
    "lighton_ocr llava llava_next llava_next_video llava_onevision mistral3 musicflamingo ovis2 paligemma "
    "pp_chart2table qianfan_ocr qwen2_audio qwen3_asr shieldgemma2 smolvlm video_llama_3 video_llava vipllava "
    "voxtral".split()
)
"""``model_type`` of wrappers whose logits are the bare unembed output, whatever the text model's own would be."""

SCALED_HEADS: Final = frozenset(
    "cohere_compass gemma4 gemma4_unified granite4_vision hyperclovax_vision_v2 inkling_mm_model muse_glimmer".split()
)
"""``model_type`` of wrappers that apply the factor, or the cap, of the text model."""
