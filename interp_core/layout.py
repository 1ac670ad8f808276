"""Roles to modules: where a transformers decoder keeps the parts that points are made of.

Found by structure: the list of blocks by its length and place, the parts of a block by the few names that
transformers uses for them, and which norm is which by the facts of the family. A role that a block must
have by its facts, and does not, is an error; nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from interp_core.errors import BackendUnavailable
from interp_core.facts import LayerFacts, ModelFacts

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Layout", "find_layout"]

_LIST_NAMES: Final = ("layers", "h", "blocks", "block", "layer")
_NOT_THE_TRUNK: Final = ("vision", "visual", "audio", "codec", "qformer", "encoder", "mtp", "draft")
_FINAL_NORMS: Final = (
    *("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "layer_norm", "out_norm"),
    *("norm_f", "layernorm", "ln", "LayerNorm", "layernorm_embedding", "ln_out"),
    "embedding_norm",  # LFM2 calls the norm before the unembedding so
)
_HEAD_TRANSFORMS: Final = ("generator_predictions", "lm_head")

_MLP_PRE_NORMS: Final = (
    "post_attention_layernorm",
    "ln_2",
    "post_attention_norm",
    "feedforward_layernorm",
    "final_layer_norm",
    "norm_2",
    "pre_ff_layernorm",
    "ffn_norm",
    "channel_pre_norm",
)
_ATTN_SUM_NORMS: Final = ("self_attn_layer_norm", "ln_1")
_MLP_SUM_NORMS: Final = ("final_layer_norm", "ln_2")

_ATTENTION: Final = ("self_attn", "attn", "attention", "self_attention")
# Token mixers that are no softmax attention, and one name for whatever a block of one sublayer holds.
_MIXERS: Final = (*_ATTENTION, "linear_attn", "mamba", "conv", "temporal_block", "mixer")
_MLP: Final = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "mlp_block")

_WITHIN_ATTENTION: Final[Mapping[str, tuple[str, ...]]] = {
    "attn.o_proj": ("o_proj", "c_proj", "out_proj", "dense"),
    "attn.q_proj": ("q_proj",),
    "attn.v_proj": ("v_proj",),
    "attn.gate_proj": ("gate_proj", "g_proj", "q_gate_proj"),
    "attn.qkv_thirds": ("c_attn", "qkv_proj", "Wqkv"),
    "attn.qkv_per_head": ("query_key_value",),
    "attn.q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "attn.k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
}
_WITHIN_MLP: Final[Mapping[str, tuple[str, ...]]] = {
    "mlp.down_proj": ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "output_linear"),
    "mlp.gate_proj": ("gate_proj", "w1"),
    "mlp.up_proj": ("up_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in", "w3"),
    "mlp.gate_up_proj": ("gate_up_proj", "Wi", "input_linear"),
}
_ROUTER: Final = ("gate", "router")
_EXPERTS: Final = ("experts",)
_BESIDE: Final = ("shared_mlp",)


@define(eq=False)
class Layout:
    """The modules of a model by role. Roles of a block are looked up per layer.

    Attributes:
        trunk: ``embed``, ``final_norm``, ``lm_head``.
        blocks: per layer, ``block``, ``attn``, ``attn.o_proj``, ``mlp``, ``attn_post_norm``, ...
    """

    trunk: dict[str, nn.Module]
    blocks: list[dict[str, nn.Module]] = field(factory=list)

    def module(self, role: str, layer: int | None) -> nn.Module:
        """The module of a role.

        Raises:
            BackendUnavailable: this model has no module of that role, though its facts promise one.
        """
        found = (self.trunk if layer is None else self.blocks[layer]).get(role)
        if found is None:
            where = "the trunk" if layer is None else f"layer {layer}"
            raise BackendUnavailable(
                f"{where} of this model has no module that serves as {role!r}, which its configuration promises; "
                "register an Architecture that says where it is"
            )
        return found

    def has(self, role: str, layer: int | None) -> bool:
        """Whether there is a module of that role."""
        return role in (self.trunk if layer is None else self.blocks[layer])


def find_layout(model: Any, facts: ModelFacts, *, embed: Any = None, lm_head: Any = None) -> Layout:
    """The layout of a conventional decoder.

    Args:
        model: the model.
        facts: what its configuration says.
        embed, lm_head: the two where another engine keeps them; ``None`` asks the model as transformers does.

    Raises:
        BackendUnavailable: the list of blocks, or a part that facts promise, is not found.
    """
    head = _unembedding(model) if embed is None else lm_head
    trunk: dict[str, nn.Module | None] = {
        "embed": model.get_input_embeddings() if embed is None else embed,
        "lm_head": head,
    }
    if facts.head_transform and head is not None:
        trunk |= _head_roles(model, head)
    layout = Layout({role: _only(part) for role, part in trunk.items() if part is not None})
    if "layers" in facts.absent:
        return layout  # Nothing inside its blocks is served, and they may be no modules.
    path, blocks = _block_list(model, facts)
    final_norm = _final_norm(model, path) if facts.final_norm else None
    if final_norm is not None:
        layout.trunk["final_norm"] = final_norm
    turns: Counter[str] = Counter()
    for layer, block in zip(facts.layers, blocks, strict=True):
        layout.blocks.append(_block_roles(block, layer, facts, turns[layer.mixer]))
        turns[layer.mixer] += 1
    return layout


def _only(module: nn.Module) -> nn.Module:
    """The one member of a list of one, such as of the embeddings of one codebook."""
    from torch import nn

    return module[0] if isinstance(module, nn.ModuleList) and len(module) == 1 else module


def _final_norm(model: nn.Module, path: str) -> nn.Module | None:
    """Beside the list of blocks, or further out."""
    while path:
        path = path.rpartition(".")[0]
        found = _child(model.get_submodule(path), _FINAL_NORMS)
        if found is not None:
            return found
    return None


def _head_roles(model: nn.Module, lm_head: nn.Module) -> dict[str, nn.Module | None]:
    """Layers between trunk and unembedding: in one module with the unembedding, or in a module of their own."""
    path = next(path for path, module in model.named_modules() if module is lm_head)
    if "." in path:
        return {"head": model.get_submodule(path.partition(".")[0])}
    return {"head_transform": _child(model, _HEAD_TRANSFORMS)}


def _unembedding(model: Any) -> nn.Module | None:
    """The model's own, or that of the language model inside it."""
    parts: tuple[Any, ...] = (model, getattr(model, "language_model", None))
    asked = (part.get_output_embeddings() for part in parts if hasattr(part, "get_output_embeddings"))
    return next((found for found in asked if found is not None), None)


def _block_list(model: nn.Module, facts: ModelFacts) -> tuple[str, nn.ModuleList]:
    from torch import nn

    n_layers, own = facts.n_layers, (*facts.roles.get("attn", "").split(), *facts.roles.get("mlp", "").split())
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == n_layers
        and path.rpartition(".")[2] in _LIST_NAMES
        # Any of them: of a trunk that is split into stages, a process holds some blocks only.
        and any(_child(block, (*_MIXERS, *_MLP, *own)) is not None for block in module)
    ]
    candidates = [(path, module) for path, module in lists if not any(word in path for word in _NOT_THE_TRUNK)]
    # The models that began as encoders call their only trunk so.
    candidates = candidates or [(path, module) for path, module in lists if path.split(".")[1:2] == ["encoder"]]
    if len(candidates) != 1:
        found = ", ".join(path for path, _ in candidates) or "none"
        raise BackendUnavailable(
            f"the list of this model's {n_layers} blocks is not found by structure (candidates: {found}); "
            "register an Architecture that says where it is"
        )
    return candidates[0]


def _child(module: nn.Module, names: Iterable[str]) -> nn.Module | None:
    """The first of ``names`` that is a module; a dot leads into one."""
    from torch import nn

    for name in names:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, nn.Module):
            return found
    return None


def _block_roles(block: nn.Module, layer: LayerFacts, facts: ModelFacts, turn: int) -> dict[str, nn.Module]:
    roles: dict[str, nn.Module] = {"block": block}
    own = {role: path.format(turn=turn).split() for role, path in facts.roles.items()}
    halves: list[tuple[str, tuple[str, ...], Mapping[str, tuple[str, ...]]]] = []
    if layer.mixer != "none":
        halves.append(("attn", _MIXERS, _WITHIN_ATTENTION))
    if layer.mlp != "none":
        # Where MLPs are blocks of their own, they have the name of what they stand for.
        halves.append(("mlp", _MLP if layer.mixer != "none" else (*_MLP, "mixer"), _WITHIN_MLP))
    for role, names, parts in halves:
        module = _child(block, own.get(role, names))
        if module is None:
            if role == "attn":
                continue
            module = block  # OPT and its kin keep the projections of the MLP in the block itself
        else:
            roles[role] = module
            if role == "attn":
                module = _child(module, ("attention",)) or module  # GPT-Neo wraps the one that works
        for inner, inner_names in parts.items():
            part = _child(module, inner_names)
            if part is not None:
                roles[inner] = part
    if layer.mlp == "sparse":
        roles |= _expert_roles(block, roles.get("mlp", block), facts.routing.logits_module)
    roles |= _norm_roles(block, facts.norms(layer.index), on_sum=facts.norm_on_sum)
    for role, paths in own.items():
        part = _child(block, paths)
        if part is not None:
            roles[role] = part
    return roles


def _expert_roles(block: nn.Module, mlp: nn.Module, logits_module: str) -> dict[str, nn.Module]:
    """The parts of a mixture of experts that this model has: another engine may fuse some of them."""
    router = _child(mlp, _ROUTER)
    found = {"mlp.router": router, "mlp.experts": _child(mlp, _EXPERTS), "mlp.beside": _child(block, _BESIDE)}
    if router is not None and logits_module:
        found["mlp.router_logits"] = router if logits_module == "." else _child(router, (logits_module,))
    return {role: module for role, module in found.items() if module is not None}


def _norm_roles(block: nn.Module, norms: frozenset[str], *, on_sum: bool) -> dict[str, nn.Module]:
    """Which norm is which depends on how many there are: ``post_attention_layernorm`` is two different things."""
    names: dict[str, tuple[str, ...]] = {}
    if on_sum:
        names = {"attn_sum_norm": _ATTN_SUM_NORMS, "mlp_sum_norm": _MLP_SUM_NORMS}
    if "attn_post_norm" in norms:
        names["attn_post_norm"] = ("post_self_attn_layernorm", "post_norm1", "post_attention_layernorm")
    if "mlp_post_norm" in norms:
        names["mlp_post_norm"] = ("post_norm2", "post_mlp_layernorm", "post_feedforward_layernorm")
    if "mlp_pre_norm" in norms:
        names["mlp_pre_norm"] = ("pre_feedforward_layernorm", "pre_mlp_layernorm")
        if "attn_post_norm" not in norms:
            names["mlp_pre_norm"] += _MLP_PRE_NORMS
        elif hasattr(block, "post_self_attn_layernorm") or hasattr(block, "post_norm1"):
            names["mlp_pre_norm"] = ("post_attention_layernorm",)
    found = {role: _child(block, options) for role, options in names.items()}
    return {role: module for role, module in found.items() if module is not None}
