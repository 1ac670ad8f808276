"""From a transformers configuration to :class:`~interp_core.facts.ModelFacts`, by arithmetic on its keys.

No model class is touched and neither torch nor transformers is imported: the instance is only asked for
attributes. Dimensions come from the configuration alone; what it does not state comes from the table of
families, and a trunk that has no row there says so by ``structure_known=False``.
"""

from __future__ import annotations

import struct
from math import log
from typing import Any, Final

from attrs import evolve

from interp_core.errors import ModelUnavailable
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.facts_config import ConfigView, Dimensions, read_dimensions, trunk_of
from interp_core.facts_layers import read_layers
from interp_core.families import BARE_HEADS, FAMILIES, SCALED_HEADS, UNKNOWN_FAMILY, FamilyFacts
from interp_core.routing import read_routing

__all__ = ["read_facts"]

_EPS: Final = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon")
_ACTIVATION: Final = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "mlp_hidden_act",
    "ff_activation",
    "dense_act_fn",
    "afn",
)
_MAX_POSITIONS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_target_positions",
    "seq_length",
    "n_ctx",
)
_ROTARY_KEYS: Final = ("rope_parameters", "rope_theta", "rotary_dim", "rotary_pct", "rotary_value", "rotary_emb_base")
# Number of copies or lanes of the residual, on trunks that carry more than one.
_STREAMS: Final = ("hc_mult", "hc_count", "altup_num_inputs", "num_residual_streams")
_FINAL_CAP: Final = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_ATTN_CAP: Final = ("attn_logit_softcapping",)


# Words of attention features, and of what is called so and changes no score.
_ATTENTION_WORDS: Final = ("attn", "attention", "alibi", "sink", "softcap", "logn", "window", "temperature_tuning")
_NOT_A_SCORE: Final = ("dropout", "pdrop", "implementation", "output_attentions", "bias", "attention_layers")


def read_facts(config: Any) -> ModelFacts:
    """Everything that the configuration, and the family's row, say about the text decoder.

    Args:
        config: a transformers configuration, as an instance with its defaults filled in.

    Raises:
        ModelUnavailable: it does not describe a decoder, or contradicts itself.
    """
    trunk, text_path = trunk_of(config)
    whole, view = ConfigView(config), ConfigView(trunk)
    size = read_dimensions(view)
    model_type = _type_of(trunk, config)
    n_streams = max(view.integer(*_STREAMS) or 1, 1)
    _require_decoder(model_type, view)
    family, other_form = _form(FAMILIES.get(model_type), view) if n_streams == 1 else (None, "")
    known = family or UNKNOWN_FAMILY
    if known.n_layers_key:
        size = evolve(size, n_layers=view.integer(known.n_layers_key) or size.n_layers)
    layers = read_layers(view, known, size)
    wrapper = str(whole.get("model_type") or "") if trunk is not config else None
    head, head_known = _head(view, known, wrapper)
    return ModelFacts(
        model_type=model_type,
        outer_model_type=str(whole.get("model_type") or ""),
        architecture=str(next(iter(whole.listed("architectures") or view.listed("architectures") or []), "")),
        text_path=text_path,
        structure_known=family is not None and head_known,
        other_form=other_form,
        n_layers=size.n_layers,
        d_model=size.d_model,
        vocab_size=size.vocab_size,
        layers=layers,
        n_streams=n_streams,
        routing=read_routing(model_type, view),
        unknown_attention=_unknown_attention(trunk),
        tied_embeddings=known.ties and _tied(whole, view),
        dtype=_dtype(whole, view),
        quantization=_quantization(whole, view),
        eos_token_ids=_ids(view) or _ids(whole),
        bos_token_id=_first_id(view, whole),
        **_headline(layers),
        **_structure(view, known),
        **_scaling(view, known, size),
        **head,
    )


def _type_of(trunk: Any, config: Any) -> str:
    """``model_type`` of the trunk; some wrappers write their own over that of the text configuration they hold."""
    stated, own = ConfigView(trunk).get("model_type"), getattr(type(trunk), "model_type", "")
    overwritten = trunk is not config and stated == ConfigView(config).get("model_type") and isinstance(own, str)
    return str((own if overwritten else stated) or "")


def _require_decoder(model_type: str, view: ConfigView) -> None:
    """Refuse a configuration whose attention sees the tokens behind a position too, or that needs more than tokens.

    Raises:
        ModelUnavailable: it does.
    """
    row = FAMILIES.get(model_type, UNKNOWN_FAMILY)
    if row.refused:
        raise ModelUnavailable(f"{model_type!r} is not served: {row.refused}")
    for key, value in row.causal_keys.items():
        if view.get(key) != value:
            raise ModelUnavailable(
                f"{model_type!r} describes no decoder with {key}={view.get(key)!r}: its attention sees both ways. "
                f"A checkpoint that was trained as a decoder states {key}={value!r}"
            )
    for key, counted in row.one_of.items():
        if view.get(key) not in (None, 1):
            raise ModelUnavailable(f"{model_type!r} reads {view.get(key)} {counted} ({key}): it does not run on tokens")
    for key, meaning in row.needs.items():
        if view.get(key) is None:
            raise ModelUnavailable(f"{model_type!r} does not run on tokens alone: {key} does not say {meaning}")


def _form(row: FamilyFacts | None, view: ConfigView) -> tuple[FamilyFacts | None, str]:
    """The family's row, or the one of its other forms that describes this configuration; else why none does."""
    if row is None:
        return None, ""
    why = ""
    for name, value in row.requires.items():
        stated = view.get(name)
        if stated is not None and stated != value:
            why = f"{view.get('model_type')!r} with {name}={stated!r} computes something that is not described here"
    for left, right in row.equal_keys:
        if view.get(left) not in (None, view.get(right)):
            why = f"{view.get('model_type')!r} is described here where {left} and {right} are equal, and they differ"
    if not why:
        return row, ""
    found, other = _form(row.otherwise, view)
    return found, other or why


def _unknown_attention(trunk: Any) -> tuple[str, ...]:
    """Keys that a checkpoint adds to its class: what they do to attention, nothing here can say."""
    declared = set(getattr(type(trunk), "__dataclass_fields__", ())) | set(dir(type(trunk)))
    found = []
    for key, value in vars(trunk).items():
        named = any(word in key for word in _ATTENTION_WORDS) and not any(word in key for word in _NOT_A_SCORE)
        if named and key not in declared and value and not key.startswith("_"):
            found.append(key)
    return tuple(sorted(found))


def _headline(layers: tuple[LayerFacts, ...]) -> dict[str, Any]:
    """Figures of the first layer that has the part, or 0."""

    def first(name: str) -> int:
        return next((value for value in (getattr(layer, name) for layer in layers) if value), 0)

    return {name: first(name) for name in ("n_heads", "n_kv_heads", "head_dim", "v_head_dim", "d_mlp")}


def _structure(view: ConfigView, family: FamilyFacts) -> dict[str, Any]:
    positions = _positions(view, family)
    has_qk_norm = bool(family.qk_norm) and _switched(view, family.qk_norm_key)
    norm = family.norm or ("layer" if view.get("rms_norm_eps") is None and view.get(*_EPS) is not None else "rms")
    default_eps = 1e-5 if norm == "layer" else 1e-6
    return {
        "norm": norm,
        "norm_eps": family.norm_eps or view.number(*_EPS) or default_eps,
        "attn_pre_norm": family.attn_pre_norm,
        "attn_post_norm": family.attn_post_norm,
        "mlp_pre_norm": family.mlp_pre_norm,
        "mlp_post_norm": family.mlp_post_norm,
        "final_norm": family.final_norm,
        "norm_on_sum": family.norm_on_sum,
        "adds_residual": family.adds_residual,
        "contributions": family.contributions,
        "qk_norm": family.qk_norm if has_qk_norm else "",
        "gainless": family.gainless,
        "qk_norm_axes": family.qk_norm_axes,
        "qk_norm_shared": family.qk_norm_shared,
        "eps_behind": {point: _stated(view, eps) for point, eps in family.eps_behind.items()},
        "centred_behind": family.centred_behind,
        "gated_behind": family.gated_behind,
        "masked_tokens": _masked_tokens(view, family),
        "gated_mlp": family.gated_mlp,
        "activation": _activation(view, family),
        "final_norm_call": family.final_norm_call,
        "attn_sub_norm": family.attn_sub_norm,
        "mlp_sub_norm": family.mlp_sub_norm,
        "positions": positions,
        "max_positions": _max_positions(view, family, positions),
        "sinks": family.sinks,
        "value_scale": (view.number(family.value_scale_key) if family.value_scale_key else None) or 1.0,
        "value_clip": view.number(family.value_clip_key) if family.value_clip_key else None,
        "attn_gate": _gate(view, family),
        "attn_gate_activation": family.attn_gate_activation,
        "float16_overflows": family.float16_overflows,
        "latent_attention": bool(view.integer("kv_lora_rank")),
        "rereads": family.rereads,
        "roles": dict(family.roles),
        "absent": dict(family.absent),
    }


def _stated(view: ConfigView, eps: float | str) -> float:
    return eps if isinstance(eps, float) else view.number(eps) or 1e-6


def _masked_tokens(view: ConfigView, family: FamilyFacts) -> tuple[int, ...]:
    if family.masked_names is None:
        return ()
    key, start = family.masked_names
    tokens = view.get(key) or {}
    return tuple(sorted(token for name, token in tokens.items() if name.startswith(start)))


def _switched(view: ConfigView, key: str) -> bool:
    """Whether what a row states is switched on: always, where no key does that."""
    return not key or view.flag(key)


def _gate(view: ConfigView, family: FamilyFacts) -> str:
    per_head = family.attn_gate_key and view.get(family.attn_gate_key) in family.attn_gate_per_head
    return "per_head" if per_head else family.attn_gate


def _positions(view: ConfigView, family: FamilyFacts) -> str:
    if view.get("alibi", "attn_config.alibi") is True:
        return "alibi"
    if family.rotary_if is not None and view.get(family.rotary_if[0]) != family.rotary_if[1]:
        return "none"
    if family.positions:
        return family.positions
    if view.get("position_embedding_type") == "nope":
        return "none"
    return "rotary" if view.get(*_ROTARY_KEYS) is not None else "other"


def _activation(view: ConfigView, family: FamilyFacts) -> str:
    stated = family.activation or str(view.get(*_ACTIVATION) or "silu")
    if family.activation_limits_key and any(view.listed(family.activation_limits_key) or ()):
        return f"{stated} with limits"
    return family.activation_names.get(stated, stated)


def _max_positions(view: ConfigView, family: FamilyFacts, positions: str) -> int | None:
    if positions in ("alibi", "none"):
        # Nothing in such a model knows a longest sequence, except a table of biases that is built to a length.
        return view.integer("max_seq_len")
    stated = view.integer(*_MAX_POSITIONS)
    if stated is not None and family.positions_behind_pad:
        stated -= (view.integer("pad_token_id") or 0) + 1
    # Some relative positions state -1 for no limit.
    return stated if stated is not None and stated > 0 else None


def _scaling(view: ConfigView, family: FamilyFacts, size: Dimensions) -> dict[str, Any]:
    rooted = family.embedding_root and _switched(view, family.embedding_root_key)
    root = size.d_model**0.5 if rooted else 1.0
    width = (view.integer(family.embedding_width_key) if family.embedding_width_key else None) or size.d_model
    if family.embedding_rounded:
        root = _bfloat16(root)
    return {
        "embedding_scale": root * (view.number("embedding_multiplier", "scale_emb") or 1.0),
        "embedding_scale_inside": family.embedding_scale_inside,
        "embedding_learned": family.embedding_learned,
        "embedding_norm": family.embedding_norm and _switched(view, family.embedding_norm_key),
        "embedding_types": family.embedding_types,
        "embedding_width": width if width != size.d_model else 0,
        "head_transform": family.head_transform,
        "routed_scale": view.number("routed_scaling_factor") or 1.0,
        "halved_every": max(view.integer(family.halved_every_key) or 0, 0) if family.halved_every_key else 0,
        "residual_multiplier": _residual_multiplier(view, family, size),
        "attn_scale": _attn_scale(view, family),
        "score_terms": family.score_terms,
        "attn_difference": family.attn_difference,
        "attn_softcap": view.number(*_ATTN_CAP) if family.attn_softcap else None,
    }


def _residual_multiplier(view: ConfigView, family: FamilyFacts, size: Dimensions) -> float:
    by_depth = view.number(family.residual_depth_key) if family.residual_depth_key else None
    if by_depth is not None:
        return float(by_depth / size.n_layers**0.5)
    return view.number("residual_multiplier") or 1.0


def _bfloat16(value: float) -> float:
    """A positive number as bfloat16 keeps it: the upper half of a float32, rounded to the nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + ((bits >> 16) & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)


def _head(view: ConfigView, family: FamilyFacts, wrapper: str | None) -> tuple[dict[str, Any], bool]:
    """What happens to the unembed output, and whether that is known for this wrapper, if there is one."""
    divisor = view.number(*family.logit_divisor_keys) or 1.0
    multiplier = (view.number(*family.logit_multiplier_keys) or 1.0) / divisor
    softcap = view.number(*_FINAL_CAP) if family.final_softcap else None
    scale = 1.0 / ((view.number(family.head_divisor_key) if family.head_divisor_key else None) or 1.0)
    if wrapper in BARE_HEADS:
        return {"head_scale": 1.0, "logit_multiplier": 1.0, "final_softcap": None}, True
    plain = multiplier == scale == 1.0 and softcap is None
    known = wrapper is None or plain or wrapper in SCALED_HEADS
    return {"head_scale": scale, "logit_multiplier": multiplier, "final_softcap": softcap}, known


def _attn_scale(view: ConfigView, family: FamilyFacts) -> float | None:
    if family.attn_scale is not None:
        return family.attn_scale
    scalar = view.number("query_pre_attn_scalar")
    if scalar is not None and scalar > 0:
        return float(scalar**-0.5)
    if view.get("scale_attn_weights") is False:
        return 1.0
    if family.yarn_scale and view.get("rope_parameters.rope_type") not in (None, "default"):
        return _yarn_scale(view)
    return view.number("attention_multiplier", "attn_config.softmax_scale")


def _yarn_scale(view: ConfigView) -> float | None:
    """Latent attention whose rotary embedding was stretched: the usual factor, twice that of the stretching."""
    stated, factor = view.number("rope_parameters.mscale_all_dim"), view.number("rope_parameters.factor") or 1.0
    if not stated or factor <= 1.0:
        return None
    width = (view.integer("qk_nope_head_dim") or 0) + (view.integer("qk_rope_head_dim") or 0)
    return float(width**-0.5 * (0.1 * stated * log(factor) + 1.0) ** 2)


def _tied(whole: ConfigView, view: ConfigView) -> bool:
    # The unembedding belongs to the whole model, and the whole model's key decides, where it has one.
    stated = whole.get("tie_word_embeddings")
    return bool(view.get("tie_word_embeddings") if stated is None else stated)


def _dtype(whole: ConfigView, view: ConfigView) -> str | None:
    stated = view.get("dtype") or whole.get("dtype")
    return None if stated is None else str(stated).removeprefix("torch.")


def _quantization(whole: ConfigView, view: ConfigView) -> str | None:
    for holder in (whole, view):
        if holder.get("quantization_config") is not None:
            method = holder.get("quantization_config.quant_method")
            # An enumeration's member prints as its class; its value is the name.
            return str(getattr(method, "value", method)) if method is not None else "unnamed"
    return None


def _ids(view: ConfigView) -> tuple[int, ...]:
    stated = view.get("eos_token_id")
    many = stated if isinstance(stated, (list, tuple)) else [stated]
    return tuple(value for value in many if isinstance(value, int) and not isinstance(value, bool))


def _first_id(view: ConfigView, whole: ConfigView) -> int | None:
    own = view.integer("bos_token_id")
    return whole.integer("bos_token_id") if own is None else own
