"""Which blocks have a dense MLP, which have experts, and how wide and how many these are."""

from __future__ import annotations

from typing import Any, Final

from interp_core.facts_config import ConfigView, Dimensions
from interp_core.families import FamilyFacts

__all__ = ["mlp_facts"]

# Where dense and sparse layers differ, the dense width has a key of its own; it is looked for first.
_D_MLP: Final = (
    "dense_intermediate_size",
    "intermediate_size_mlp",
    "prefix_dense_intermediate_size",
    "decoder_ffn_dim",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "feed_forward_size",
    "d_inner",
    "dim_ff",
    "dff",
    "d_ff",
    "inner_dim",
    "ffn_config.ffn_hidden_size",
)
_N_EXPERTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
)
_TOP_K: Final = (
    "num_experts_per_tok",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "num_selected_experts",
    "experts_per_token",
    "ffn_config.moe_top_k",
)
_SHARED: Final = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# One shared MLP beside the experts, given by its width, or always there where experts are interleaved by a step.
_ONE_SHARED: Final = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
    "interleave_moe_layer_step",
)
_SWITCHES: Final = ("is_moe", "enable_moe_block")


def mlp_facts(
    view: ConfigView, family: FamilyFacts, index: int, size: Dimensions, word: str, alone: bool
) -> dict[str, Any]:
    """The MLP fields of one layer's record.

    Args:
        view: the layer's configuration.
        family: the family's row.
        index: the layer's number.
        size: the trunk's dimensions.
        word: the configuration's own word for the layer's kind; empty if it has none.
        alone: the layer's mixer is its only sublayer.
        own_keys: the family's own keys of a dense MLP's width.
    """
    if alone:
        return {"mlp": "none"}
    experts = _n_experts(view, index)
    if word == "moe" or (word != "mlp" and experts and _is_sparse(view, index)):
        return {
            "mlp": "sparse",
            "n_experts": experts,
            "top_k": view.item(index, *_TOP_K) or 0,
            "n_shared_experts": max(_n_shared(view, index), family.shared_experts),
        }
    width = _dense_width(view, index, size, family.d_mlp_keys)
    return {"mlp": "dense", "d_mlp": width // 2 if family.mlp_width_of_both else width}


def _n_experts(view: ConfigView, index: int) -> int:
    if any(view.get(name) is False for name in _SWITCHES):
        return 0
    per_layer = view.listed("layers_num_experts")
    if per_layer is not None:
        # Here one expert means a plain MLP; elsewhere it still means a router.
        stated = per_layer[index] if index < len(per_layer) else None
        return stated if isinstance(stated, int) and stated > 1 else 0
    return max(view.item(index, *_N_EXPERTS) or 0, 0)


def _is_sparse(view: ConfigView, index: int) -> bool:
    """Whether this layer of a mixture of experts has them; the first rule whose keys are stated decides."""
    types = view.listed("mlp_layer_types")
    if types is not None:
        return index < len(types) and types[index] != "dense"
    if view.listed("layers_num_experts") is not None:
        return True
    listed = view.get("moe_layers")
    if isinstance(listed, (list, tuple)):
        return index in listed
    step = view.integer("decoder_sparse_step")
    if step is not None or isinstance(view.get("mlp_only_layers"), (list, tuple)):
        dense = view.listed("mlp_only_layers") or ()
        return index not in dense and (index + 1) % max(step or 1, 1) == 0
    first = view.integer("first_k_dense_replace", "num_dense_layers")
    if first is not None:
        every = view.item(index, "moe_layer_freq")
        return index >= first and (every != 0 if _is_list(view, "moe_layer_freq") else index % (every or 1) == 0)
    return _in_interval(view, index)


def _in_interval(view: ConfigView, index: int) -> bool:
    start, end = view.integer("moe_layer_start_index"), view.integer("moe_layer_end_index")
    if start is not None:
        inside = index >= start and (end is None or end < 0 or index <= end)
        return inside and (index + 1) % max(view.integer("moe_layer_interval") or 1, 1) == 0
    period = view.integer("expert_layer_period")
    if period is not None and period > 0:
        return index % period == (view.integer("expert_layer_offset") or 0) % period
    return True


def _is_list(view: ConfigView, name: str) -> bool:
    return isinstance(view.get(name), (list, tuple))


def _n_shared(view: ConfigView, index: int) -> int:
    stated = view.item(index, *_SHARED)
    if stated is not None:
        return max(stated, 0)
    return 1 if (view.integer(*_ONE_SHARED) or 0) > 0 else 0


def _dense_width(view: ConfigView, index: int, size: Dimensions, own_keys: tuple[str, ...]) -> int:
    width = view.item(index, *own_keys, *_D_MLP)
    factor, multiple = view.number("ffn_proj_factor"), view.integer("ffn_round_up_to_multiple_of")
    if width is None and factor is not None and multiple:
        return -(-int(size.d_model * factor) // multiple) * multiple
    if width is None:
        # The old decoders: four times the residual's width, unless a factor is stated.
        return (view.integer("expansion_ratio", "intermediate_multiple_size") or 4) * size.d_model
    if view.get("block_types") is not None and view.get("lru_width") is not None:
        # Here the stated width counts the gate and the linear branch together.
        width //= 2
    if view.flag("block_auto_adjust_ff_dim"):
        width = _rounded_width(view, width)
    shared = view.integer("num_kv_shared_layers") or 0
    if view.flag("use_double_wide_mlp") and index >= size.n_layers - shared > 0:
        # Layers without keys and values of their own have an MLP twice as wide, where this is set.
        width *= 2
    return width


def _rounded_width(view: ConfigView, width: int) -> int:
    """Two thirds of the stated width, times a factor, rounded up to a multiple."""
    width = 2 * width // 3
    factor = view.number("block_ffn_dim_multiplier")
    if factor is None:
        return width
    multiple = max(view.integer("block_multiple_of") or 1, 1)
    return -(-int(factor * width) // multiple) * multiple
