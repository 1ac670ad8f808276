"""Roles and expressions of a model as vLLM runs it: its own classes, or transformers' tree inside it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interp_core import bindings as conventional
from interp_core.address import Address
from interp_core.errors import BackendUnavailable
from interp_core.expressions import Binding, Expression, Place, Read, Scale, Sum
from interp_core.facts import ModelFacts
from interp_core.layout import Layout, find_layout
from interp_vllm.native import FUSED, PLAIN
from interp_vllm.trunk import VllmTrunk

__all__ = ["Tree"]


class Tree:
    """A model's modules by role, and where each point is among them.

    Attributes:
        layout: modules by role; ``attn.kernel`` is vLLM's attention layer, ``mlp.router`` and ``mlp.experts`` the
            parts of a mixture of experts.
        style: ``fused``, ``plain`` or ``transformers``; ``own`` where an architecture's own bindings say it all.
        trunk: those bindings, or ``None``.
        first_stage, last_stage: whether this worker begins the trunk, and whether it ends it.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, names: Any, trunk: VllmTrunk | None = None) -> None:
        self.facts = facts
        self.model = model
        self.trunk = trunk
        self.style = _style(model) if trunk is None else "own"
        self.layout = self._layout(names)
        for roles in (self.layout.trunk, *self.layout.blocks):
            for role in [role for role, module in roles.items() if names.is_missing(module)]:
                del roles[role]
        self.first_stage, self.last_stage = names.stages()
        for layer, roles in zip(facts.layers, self.layout.blocks, strict=True):
            if layer.softmax and "attn" in roles and (kernel := names.attention_of(roles["attn"])) is not None:
                roles["attn.kernel"] = kernel

    def _layout(self, names: Any) -> Layout:
        if self.trunk is not None:
            return self.trunk.layout(self.model, self.facts)
        embedding = _embedding(self.model, names)
        return find_layout(self.model, self.facts, embed=embedding, lm_head=getattr(self.model, "lm_head", None))

    def place(self, layer: int | None, positions: Tensor) -> Place:
        """Where rows stand, for a binding that computes what it reads."""
        trunk = self.layout.trunk
        return Place(layer, positions, lambda role: self.layout.module(role, None if role in trunk else layer))

    def contract(self, stack: Tensor) -> Tensor:
        """``[rows, streams, d_model]`` as the model itself makes ``[rows, d_model]`` of it."""
        if self.trunk is None:
            raise BackendUnavailable("this trunk has one residual stream, so it has no contraction")
        return self.trunk.contract(stack, self.layout)

    def holds(self, address: Address) -> bool:
        """Whether the point's modules are in this worker, or in another pipeline stage."""
        if address.layer is not None:
            return "block" in self.layout.blocks[address.layer]
        return self.first_stage if address.name == "embeddings" else self.last_stage

    def bind(self, address: Address) -> Binding:
        """Where a point lives, read from a module's boundary. Coordinates are the caller's affair."""
        name, layer = address.name, address.layer
        if self.trunk is not None:
            return self.trunk.bind(address, self.facts, self.layout)
        if name == "embeddings":
            return Binding(self._embeddings())
        if name in ("router_logits", "expert_weights", "expert_indices"):
            return Binding(Read("mlp.router"))
        if layer is None or self.style == "transformers":
            return conventional.bind(address, self.facts, self.layout)
        return self._own_class(name, layer, address)

    def _embeddings(self) -> Expression:
        scale = self.facts.embedding_scale
        if self.style != "transformers" and scale != 1.0 and self.facts.embedding_scale_inside:
            # transformers' module holds the scale; vLLM's own classes apply it outside.
            return Scale(Read("embed"), scale)
        return Read("embed")

    def _own_class(self, name: str, layer: int, address: Address) -> Binding:
        contribution = "attn_post_norm" if self.facts.attn_post_norm else "attn"
        if name == "attn_in":
            return Binding(Read("attn.qkv_thirds", "input"))
        if name in ("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"):
            return Binding(Read(f"attn.{name[:6]}", "input" if name.endswith("in") else "output"))
        if name == "attn_out_post":
            return Binding(Read(contribution))
        if self.style == "plain":
            return conventional.bind(address, self.facts, self.layout)
        before = self._stream_before(layer)
        if name == "resid_pre":
            return Binding(before)
        if name == "resid_mid":
            # The norm that opens the MLP's half adds its two inputs, and gives the sum back beside its own output.
            halves = Sum(Read("mlp_pre_norm", "input", slot=1), Read("mlp_pre_norm", "input", slot=0))
            return Binding(Read("mlp_pre_norm", slot=1), halves)
        if name == "resid_post":
            return Binding(Sum(Read("block", slot=1), Read("block", slot=0)))
        return conventional.bind(address, self.facts, self.layout)

    @staticmethod
    def _stream_before(layer: int) -> Expression:
        hidden = Read("block", "input", slot=1)
        return hidden if layer == 0 else Sum(Read("block", "input", slot=2), hidden)


def _style(model: nn.Module) -> str:
    name = type(model).__name__
    if name.startswith("Transformers"):
        return "transformers"
    if name in FUSED:
        return "fused"
    if name in PLAIN:
        return "plain"
    raise BackendUnavailable(
        f"vLLM runs this model as {name}, whose module tree is not in the tables of this plugin; load it with "
        "model_impl='transformers'"
    )


def _embedding(model: nn.Module, names: Any) -> nn.Module:
    inner: Any = getattr(model, "model", None)
    if hasattr(inner, "get_input_embeddings"):
        found: nn.Module = inner.get_input_embeddings()
        return found
    embedding: nn.Module = names.embedding(model)
    return embedding
