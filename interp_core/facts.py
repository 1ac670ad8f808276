"""What a model's configuration says about it: records only, readable without torch.

:meth:`ModelFacts.from_config` reads a transformers configuration by arithmetic on its fields
(:mod:`interp_core.facts_reader`); what a configuration does not say, such as the order of the norms
in a block, is in a small table per family (:mod:`interp_core.families`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
from attrs import field, frozen

from interp_core.contributions import Contributions
from interp_core.converters import as_tuple
from interp_core.routing import Routing

__all__ = ["NORMS", "LayerFacts", "ModelFacts"]

NORMS: Final = ("attn_pre_norm", "attn_post_norm", "mlp_pre_norm", "mlp_post_norm")
"""The norms that a block may have before and behind its sublayers."""


@frozen(kw_only=True)
class LayerFacts:
    """One block. Widths are 0 where the block has no such part.

    Attributes:
        index: the layer's number, from 0.
        mixer: kind of the token mixer: ``full_attention``, ``sliding_attention``, ``chunked_attention``,
            ``linear_attention``, ``state_space``, ``convolution``, ``recurrent``, ``none``, or the
            configuration's own word where it is none of these.
        softmax: whether the mixer is softmax attention (has scores, probabilities, values and heads).
        window: number of keys that a query may see, itself included; ``None`` if unlimited. Of chunked attention, the
            length of a chunk.
        causal: whether a query sees no key behind it. If not, a window reaches as far forward as it does back.
        n_heads: query heads.
        n_kv_heads: key/value heads.
        head_dim: width of a query and key head.
        v_head_dim: width of a value head.
        kv_shared_from: the earlier layer whose keys and values this one uses, or ``None``.
        key_budget: number of keys (of blocks of keys, where ``key_block`` is not 1) that a query chooses among those
            that it may see; ``None`` if it attends to all.
        key_block: number of neighbouring keys that are chosen together.
        key_tail: whether only full blocks are chosen among, and the keys behind the last full one are seen by all.
        compress_rate: tokens per compressed entry, where queries see such entries beside the tokens; ``None`` if not.
        sinkless: this layer has no sink logits, though others of the trunk have.
        mlp: ``dense``, ``sparse`` (mixture of experts) or ``none``.
        d_mlp: neurons of a dense MLP.
        gate_sparsity: share of a dense MLP's neurons that are cut off before the activation, taken as normally
            distributed around their mean (Gemma 3n); 0 for none.
        n_experts: routed experts.
        top_k: experts chosen per token.
        n_shared_experts: experts that every token uses.
        parallel: attention and MLP read the same residual (no residual between them).
        second_mixer: kind of another token mixer beside the first, whose outputs the block adds up; empty if none.
        attn_scale: factor on query-key products in this layer, where it differs between layers; else ``None``.
        norms: names of the norms that the block has, where its kind of block has others than the trunk's facts say
            (``attn_pre_norm``, ``attn_post_norm``, ``mlp_pre_norm``, ``mlp_post_norm``); else ``None``.
        factors: factors that the block applies outside modules, by the role whose output they multiply; ``attn_skip``
            and ``mlp_skip`` are those on the residual that the block keeps.
        absent: points that this kind of block lacks for a reason of its own, by name.
    """

    index: int
    mixer: str = "full_attention"
    softmax: bool = True
    window: int | None = None
    causal: bool = True
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    kv_shared_from: int | None = None
    key_budget: int | None = None
    key_block: int = 1
    key_tail: bool = False
    compress_rate: int | None = None
    sinkless: bool = False
    mlp: str = "dense"
    d_mlp: int = 0
    gate_sparsity: float = 0.0
    n_experts: int = 0
    top_k: int = 0
    n_shared_experts: int = 0
    parallel: bool = False
    second_mixer: str = ""
    attn_scale: float | None = None
    norms: tuple[str, ...] | None = None
    factors: Mapping[str, float] = field(factory=dict, hash=False)
    absent: Mapping[str, str] = field(factory=dict, hash=False)


def _layers(value: Iterable[LayerFacts]) -> tuple[LayerFacts, ...]:
    return tuple(value)


def _ids(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


@frozen(kw_only=True)
class ModelFacts:
    """A whole trunk. See :class:`LayerFacts` for what differs per layer.

    Attributes:
        model_type: ``model_type`` of the (text) configuration that describes the trunk.
        outer_model_type: ``model_type`` of the whole configuration; differs on multimodal wrappers.
        architecture: class name that the checkpoint names, or empty.
        text_path: attribute that leads to the text configuration; empty if it is the whole one.
        structure_known: whether the family's block structure is in the table of families or given by an
            architecture plugin. If not, only dimensions are trustworthy and layer points are refused.
        other_form: why not, where the family is described and this configuration chooses another form of it.
        n_layers, d_model, vocab_size: dimensions.
        n_heads, n_kv_heads, head_dim, v_head_dim, d_mlp: of the first layer that has such a part.
        max_positions: longest sequence, in tokens, or ``None`` where there is no limit.
        layers: one record per block.
        n_streams: residual streams; 1 on a conventional decoder.
        norm: ``rms`` or ``layer``.
        norm_eps: the norms' epsilon.
        attn_pre_norm, attn_post_norm, mlp_pre_norm, mlp_post_norm: which norms a block has. A post-norm
            is applied to the sublayer's output before it is added to the residual.
        final_norm: whether a norm stands between the last block and the unembedding.
        norm_on_sum: a block is ``norm(residual + contribution)`` twice: each sum is normalised before anything reads
            it, and a contribution is what is added before that norm.
        adds_residual: ``attn``, ``mlp``: sublayers whose module returns its output plus the residual.
        contributions: how a block puts its contributions together.
        qk_norm: ``""`` (none), ``head`` (per head) or ``full`` (over all heads at once).
        gainless: points behind norms that have no gain.
        qk_norm_shared: whether one module normalises the queries, and then the keys.
        qk_norm_axes: how tensors of these norms lie: ``positions``, ``heads`` (heads before positions) or ``merged``
            (prompts and positions in one axis).
        eps_behind: epsilon of the norm before a point, where it is not ``norm_eps``.
        centred_behind: points behind layer norms, in a trunk whose other norms are not.
        gated_behind: points whose norm is followed by a gate that is computed from its output.
        gated_mlp: whether dense MLPs have a gate and a linear branch.
        activation: name of the MLP's activation function.
        positions: ``rotary``, ``learned``, ``alibi``, ``none`` or ``other``.
        embedding_norm: whether a norm stands between the embeddings and the first block.
        final_norm_call: which of the final norm's calls in a forward is the one after the blocks, from 0.
        attn_sub_norm, mlp_sub_norm: whether a norm stands before the last projection of the sublayer, so that ``z``
            and ``mlp_act`` are behind it.
        embedding_scale: factor on the embeddings.
        embedding_scale_inside: whether that factor is applied inside the embedding module.
        embedding_types: a vector for the kind of token is added to the embeddings.
        embedding_width: width of the embeddings, where a projection makes the residual of them; 0 if there is none.
        head_transform: layers of the model's head stand between the trunk and the unembedding.
        embedding_learned: whether a learned weight and bias per channel are applied to the embeddings.
        residual_multiplier: factor on each sublayer's contribution.
        halved_every: number of blocks after each of which the residual is halved outside of any module; 0 if never.
        head_scale: factor on the final norm's output before the unembedding.
        logit_multiplier: factor on the unembed output.
        routed_scale: factor that the configuration puts on the weights of the chosen experts.
        attn_scale: factor on query-key products, or ``None`` for ``head_dim ** -0.5``.
        masked_tokens: tokens whose logits the model replaces by the lowest number, so that it never gives them.
        score_terms: what the code does to scores besides scaling, cap and mask, in words; empty if nothing.
        attn_difference: whether ``z`` is a difference between what the two halves of the heads sum up, normalised.
            Heads ``2j`` and ``2j + 1`` of ``z`` are then the two halves of what the heads ``j`` and ``j + heads / 2``
            make together.
        attn_softcap, final_softcap: caps, or ``None``.
        sinks: attention has sink logits in the softmax's denominator.
        value_scale: factor on the value projection, applied behind it.
        value_clip: bound that the value projection is clipped to, or ``None``.
        attn_gate: ``""``, ``packed`` (in the query projection), ``separate``, or ``per_head`` (one number per head).
        attn_gate_activation: what is applied to the gate before it multiplies: ``sigmoid`` or ``softplus``.
        routing: how mixtures of experts choose and mix.
        float16_overflows: activations of the family's published checkpoints pass the largest float16 number.
        unknown_attention: keys of the configuration that name an attention feature, and that neither the
            configuration's class nor this package knows.
        latent_attention: keys and values are projected from a latent vector (MLA).
        shared_key_value: the rotated key is the value too, and its rotation is undone behind the attention.
        tied_embeddings: unembedding and embedding share a weight.
        rereads: whether a forward takes all tokens so far beside its cache, and not the new ones alone.
        dtype: the checkpoint's own dtype name, or ``None``.
        quantization: name of the quantisation method, or ``None``.
        eos_token_ids, bos_token_id: special ids of the configuration.
        roles: path within a block of each role whose module has a name of its own in this family; of several, parted
            by spaces, the first that there is. ``{turn}`` is the number of earlier blocks with the same kind of mixer.
        absent: points that this family's code has not, each with the reason; ``layers`` stands for all of its blocks.
        extra: whatever an architecture adds, by its own names.
    """

    model_type: str
    outer_model_type: str = ""
    architecture: str = ""
    text_path: str = ""
    structure_known: bool = False
    other_form: str = ""
    n_layers: int
    d_model: int
    vocab_size: int
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    d_mlp: int = 0
    max_positions: int | None = None
    layers: tuple[LayerFacts, ...] = field(converter=_layers)
    n_streams: int = 1
    norm: str = "rms"
    norm_eps: float = 1e-6
    attn_pre_norm: bool = True
    attn_post_norm: bool = False
    mlp_pre_norm: bool = True
    mlp_post_norm: bool = False
    final_norm: bool = True
    norm_on_sum: bool = False
    adds_residual: tuple[str, ...] = ()
    contributions: Contributions = Contributions()
    qk_norm: str = ""
    gainless: tuple[str, ...] = field(default=(), converter=as_tuple)
    qk_norm_axes: str = "positions"
    qk_norm_shared: bool = False
    eps_behind: Mapping[str, float] = field(factory=dict)
    centred_behind: tuple[str, ...] = field(default=(), converter=as_tuple)
    gated_behind: tuple[str, ...] = field(default=(), converter=as_tuple)
    gated_mlp: bool = True
    activation: str = "silu"
    positions: str = "rotary"
    embedding_norm: bool = False
    final_norm_call: int = 0
    attn_sub_norm: bool = False
    mlp_sub_norm: bool = False
    embedding_scale: float = 1.0
    embedding_scale_inside: bool = True
    embedding_types: bool = False
    embedding_width: int = 0
    head_transform: bool = False
    embedding_learned: bool = False
    residual_multiplier: float = 1.0
    halved_every: int = 0
    head_scale: float = 1.0
    logit_multiplier: float = 1.0
    routed_scale: float = 1.0
    attn_scale: float | None = None
    masked_tokens: tuple[int, ...] = field(default=(), converter=_ids)
    score_terms: str = ""
    attn_difference: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    sinks: bool = False
    value_scale: float = 1.0
    value_clip: float | None = None
    attn_gate: str = ""
    attn_gate_activation: str = "sigmoid"
    routing: Routing = field(factory=Routing)
    float16_overflows: bool = False
    unknown_attention: tuple[str, ...] = ()
    latent_attention: bool = False
    shared_key_value: bool = False
    tied_embeddings: bool = False
    rereads: bool = False
    dtype: str | None = None
    quantization: str | None = None
    eos_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    bos_token_id: int | None = None
    roles: Mapping[str, str] = field(factory=dict, hash=False)
    absent: Mapping[str, str] = field(factory=dict, hash=False)
    extra: Mapping[str, Any] = field(factory=dict, eq=False)

    @classmethod
    def from_config(cls, config: Any) -> ModelFacts:
        """Read a transformers configuration (an instance, defaults filled in; no model class is touched).

        Raises:
            ModelUnavailable: the configuration does not describe a decoder.
        """
        from interp_core.facts_reader import read_facts

        return read_facts(config)

    def halved_after(self, layer: int) -> bool:
        """Whether the residual is halved behind a layer's block."""
        return self.halved_every > 0 and (layer + 1) % self.halved_every == 0

    def norms(self, layer: int) -> frozenset[str]:
        """Names of the norms that a block has, among the four that facts tell."""
        own = self.layers[layer].norms
        return frozenset(own if own is not None else (name for name in NORMS if getattr(self, name)))

    def plain_contribution(self, half: str) -> bool:
        """Whether what ``attn`` or ``mlp`` adds is its output, through a post-norm and a factor at most."""
        terms = self.contributions.attn_terms if half == "attn" else self.contributions.mlp_terms
        return not terms and half not in self.contributions.weights and f"{half}_post" not in self.roles

    @property
    def last_layer(self) -> int:
        """Number of the last block that runs on text alone."""
        return max((layer.index for layer in self.layers if layer.mixer != "cross_attention"), default=0)

    def axis_size(self, axis: str, layer: int | None = None) -> int:
        """Size of a point's axis; ``query`` and ``key`` depend on the input and give 0.

        Per-layer axes on a trunk point, or ``layer=None``, use the headline figures.
        """
        simple = {"d_model": self.d_model, "vocab": self.vocab_size, "streams": self.n_streams, "query": 0, "key": 0}
        if axis in simple:
            return simple[axis]
        names = {"heads": "n_heads", "kv_heads": "n_kv_heads", "experts": "n_experts"}
        source: Any = self if layer is None else self.layers[layer]
        return int(getattr(source, names.get(axis, axis), 0))

    def describe(self) -> dict[str, Any]:
        """All of it as a JSON-able record."""
        return attrs.asdict(self, recurse=True)
