"""What a configuration says of each block: mixer, window, head widths, shared keys and values, MLP or experts.

The rules follow the modelling code of transformers 5.19, by configuration key and never by family name.
"""

from __future__ import annotations

from typing import Any, Final

from interp_core.errors import ModelUnavailable
from interp_core.facts import LayerFacts
from interp_core.facts_config import ConfigView, Dimensions
from interp_core.facts_mlp import mlp_facts
from interp_core.families import FamilyFacts

__all__ = ["read_layers"]

_N_HEADS: Final = ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "attention_heads")
_N_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads")
_HEAD_DIM: Final = ("head_dim", "attention_head_dim", "attention_head_size", "kv_channels", "d_head", "dim_head")
# Some trunks give their sliding layers heads of their own.
_SLIDING_HEADS: Final = ("swa_num_attention_heads", "num_sliding_attention_heads")

_KINDS: Final = ("layer_types", "layers_block_type", "attention_layers", "attn_layers")
_STATE_KEYS: Final = ("mamba_d_state", "ssm_state_size", "state_size")
_WINDOW: Final = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
_WORDS: Final = {
    "attention": "full_attention",
    "global": "full_attention",
    "local": "sliding_attention",
    "mamba": "state_space",
    "conv": "convolution",
    "mlp": "none",
    "moe": "none",
}
_CONVOLVED: Final = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
_SLIDING: Final = frozenset({"sliding_attention", "hybrid_sliding"})
_NO_SOFTMAX: Final = frozenset(
    {"linear_attention", "state_space", "convolution", "recurrent", "cross_attention", "none"}
)


def read_layers(view: ConfigView, family: FamilyFacts, size: Dimensions) -> tuple[LayerFacts, ...]:
    """One record per block.

    Raises:
        ModelUnavailable: a list that has one entry per layer has not as many as there are layers.
    """
    words = _stated_kinds(view, family, size.n_layers)
    mixers = _mixers(view, family, words, size.n_layers)
    sources = _shared_from(view, mixers)
    alone = _without_mlp(view, words, mixers)
    parallel = family.parallel or view.flag(*family.parallel_keys)
    causal = family.causal and view.get("use_bidirectional_attention") not in (True, "all")
    layers = []
    for index, mixer in enumerate(mixers):
        own = view.layer(index)
        softmax = mixer not in _NO_SOFTMAX
        values: dict[str, Any] = _head_widths(own, family, index, mixer, size.d_model) if softmax else {}
        values |= mlp_facts(own, family, index, size, words[index] if words else "", alone[index])
        values |= {"window": _window(own, mixer), "kv_shared_from": sources[index]}
        if family.key_budget_key and softmax and family.key_budget_kind in ("", mixer):
            values["key_budget"] = own.integer(family.key_budget_key)
            values["key_block"] = (own.integer(family.key_block_key) if family.key_block_key else None) or 1
        values["causal"] = causal
        values["sinkless"] = family.sliding_sinks and mixer not in _SLIDING
        values["parallel"] = parallel and mixer != "none" and values["mlp"] != "none"
        values |= {"second_mixer": family.second_mixer, "norms": family.mixer_norms.get(mixer)}
        if index == 0 and family.first_norms is not None:
            values["norms"] = family.first_norms
        values["factors"] = _factors(own, family, mixer)
        values["absent"] = _absent(family, mixer, values["mlp"])
        if softmax and family.attn_scale_of is not None and values.get("head_dim"):
            values["attn_scale"] = family.attn_scale_of(values["head_dim"])
        layers.append(LayerFacts(index=index, mixer=mixer, softmax=softmax, **values))
    return tuple(layers)


def _factors(view: ConfigView, family: FamilyFacts, mixer: str) -> dict[str, float]:
    """What the configuration states of the factors that the code applies outside modules; 1 is not kept."""
    found = {}
    for role, key in family.factor_keys.items():
        name = key if isinstance(key, str) else key.get(mixer, "")
        value = view.number(name) if name else None
        if value is not None and value != 1.0:
            found[role] = value
    return found


def _absent(family: FamilyFacts, mixer: str, mlp: str) -> dict[str, str]:
    here = (a for a in family.absent_in if (not a.mixers or mixer in a.mixers) and a.mlp in ("", mlp))
    return {point: absence.why for absence in here for point in absence.points}


def _stated_kinds(view: ConfigView, family: FamilyFacts, n_layers: int) -> list[str]:
    """The configuration's own words, one per layer; empty if it states none, or the code reads none."""
    if family.windows in ("all", "none"):
        return []
    words = view.listed(*_KINDS)
    if words is None:
        pattern = view.listed("block_types")
        if pattern is None:
            return []
        words = [pattern[index % len(pattern)] for index in range(n_layers)]
    if view.integer(*_WINDOW):
        # Old lists know one word for attention, and a window is then for all of it.
        words = ["sliding_attention" if word == "attention" else word for word in words]
    if len(words) != n_layers:
        name = view.get("model_type")
        raise ModelUnavailable(f"{name!r} states {n_layers} layers, and kinds for {len(words)} of them")
    return [str(word) for word in words]


def _mixers(view: ConfigView, family: FamilyFacts, words: list[str], n_layers: int) -> list[str]:
    state_space = view.integer(*_STATE_KEYS) is not None
    if not words:
        if view.integer(*_N_HEADS) is None:
            return ["state_space" if state_space else "recurrent"] * n_layers
        slides = family.windows in ("all", "auto") and bool(view.integer(*_WINDOW))
        words = ["sliding_attention" if slides else "full_attention"] * n_layers
    mixers = [_WORDS.get(word, word) for word in words]
    if not state_space:
        # Attention with a short convolution's state beside its keys; with a state space, it is a block of both.
        mixers = [_CONVOLVED.get(mixer, mixer) for mixer in mixers]
    if state_space:
        # transformers calls state-space layers linear attention too; the state's size tells them apart.
        mixers = ["state_space" if mixer == "linear_attention" else mixer for mixer in mixers]
    for index in view.listed("cross_attention_layers") or []:
        if isinstance(index, int) and 0 <= index < n_layers:
            mixers[index] = "cross_attention"
    return mixers


def _without_mlp(view: ConfigView, words: list[str], mixers: list[str]) -> list[bool]:
    """Per layer, whether the mixer is the block's only sublayer."""
    if {"mlp", "moe"} & set(words):
        # MLPs are blocks of their own here.
        return [word not in ("mlp", "moe") for word in words]
    if view.integer(*_N_HEADS) is None:
        return [mixer == "state_space" for mixer in mixers]
    # Where some blocks hold a whole transformer block beside the state space, the others hold no MLP.
    return [mixer == "state_space" and "hybrid" in mixers for mixer in mixers]


def _window(view: ConfigView, mixer: str) -> int | None:
    if mixer in _SLIDING:
        return view.integer(*_WINDOW) or None
    if mixer == "chunked_attention":
        return view.integer("attention_chunk_size") or None
    return None


def _head_widths(view: ConfigView, family: FamilyFacts, index: int, mixer: str, d_model: int) -> dict[str, int]:
    sliding = mixer in _SLIDING
    stated = view.item(index, *(_SLIDING_HEADS if sliding else ()), "num_attention_heads_per_layer", *_N_HEADS)
    n_heads = max(stated or 0, 0)
    if not n_heads:
        return {}
    latent = view.integer("kv_lora_rank") and view.integer("qk_nope_head_dim") is not None
    if latent:
        # Every head has its own keys and values, projected from the latent vector.
        head_dim = (view.integer("qk_nope_head_dim") or 0) + (view.integer("qk_rope_head_dim") or 0)
        n_kv_heads = n_heads
    else:
        head_dim = view.item(index, *(("swa_head_dim",) if sliding else ()), *_HEAD_DIM) or d_model // n_heads
        n_kv_heads = _kv_heads(view, index, sliding, n_heads) * (family.sliding_kv_factor if sliding else 1)
    v_head_dim = view.item(index, *(("swa_v_head_dim",) if sliding else ()), "v_head_dim") or head_dim
    widths = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
    if min(widths.values()) < 1:
        raise ModelUnavailable(f"{view.get('model_type')!r} states heads that cannot be, in layer {index}: {widths}")
    return widths


def _kv_heads(view: ConfigView, index: int, sliding: bool, n_heads: int) -> int:
    if view.flag("multi_query") and not view.flag("new_decoder_architecture"):
        return 1
    if view.integer("decoder_attention_heads") is not None:
        return n_heads  # such halves of encoder-decoders have no groups, and the plain key means the encoder's
    keys = (*(("swa_num_key_value_heads",) if sliding else ()), *_N_KV_HEADS)
    return view.item(index, *keys) or n_heads


def _shared_from(view: ConfigView, mixers: list[str]) -> list[int | None]:
    """Per layer, the earlier layer whose keys and values it uses: the last unshared one of its own kind."""
    sources: list[int | None] = [None] * len(mixers)
    shared = view.integer("num_kv_shared_layers") or 0
    first = len(mixers) - shared
    if shared < 1 or first < 1:
        return sources
    last = {mixer: index for index, mixer in enumerate(mixers[:first])}
    for index in range(first, len(mixers)):
        sources[index] = last.get(mixers[index])
    return sources
