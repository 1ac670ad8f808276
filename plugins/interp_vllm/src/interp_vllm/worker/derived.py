"""Points that vLLM holds nowhere as a tensor: computed from rows that it does hold, when a caller fetches them."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from interp_core.address import Address
from interp_core.profile import ModelProfile
from interp_core.selection import axes_of, select
from interp_vllm.worker.attention import check_terms, rebuilt
from interp_vllm.worker.bindings import Tree

__all__ = ["DERIVED", "Derived"]

DERIVED: Final = {"lm_head": "final_norm", "expert_weights": "router_logits", "expert_indices": "router_logits"}
"""Each derived point, and the point whose rows it is computed from."""


class Derived:
    """Derived points of one model. Attention kernels and the unembedding are checked against the facts here."""

    def __init__(self, tree: Tree, profile: ModelProfile, names: Any, size: int) -> None:
        self.tree, self.profile, self.names, self.size = tree, profile, names, size
        self.terms: dict[int, dict[str, Any]] = {}
        for layer, roles in zip(profile.facts.layers, tree.layout.blocks, strict=True):
            if "attn.kernel" in roles:
                self.terms[layer.index] = names.kernel_terms(roles["attn.kernel"])
                check_terms(self.terms[layer.index], layer, profile.facts)
        # vLLM's Transformers backend does not know every family's multiplier; logits would be off by it.
        if tree.last_stage:
            names.set_head_terms(tree.model, profile.facts.logit_multiplier, profile.facts.final_softcap)

    def source(self, address: Address) -> Address:
        """The address whose rows are kept for ``address``."""
        return Address(DERIVED[address.name], address.layer) if self._computed(address) else address

    def _computed(self, address: Address) -> bool:
        """Whether a point is computed from another one's rows, unless the trunk's own bindings say where it is."""
        own = self.tree.trunk is not None and address.layer is not None
        return address.name in DERIVED and not own

    def value(self, address: Address, rows: Tensor) -> Tensor:
        """``address`` from the rows of its source."""
        if address.name == "lm_head":
            found = self.names.bare_logits(self.tree.model, rows)
        elif self._computed(address):
            assert address.layer is not None
            experts = self.tree.layout.module("mlp.experts", address.layer)
            weights, indices = self.names.route(experts, rows)
            found = weights.to(rows.dtype) if address.name == "expert_weights" else indices.long()
        else:
            return rows
        return select(found, *axes_of(self.profile, address))

    def attention(self, address: Address, query: Tensor, key: Tensor, positions: Tensor) -> Tensor:
        """Scores or probabilities, in the model's dtype."""
        assert address.layer is not None
        layer, terms = self.profile.facts.layers[address.layer], self.terms[address.layer]
        per_head = {n: None if terms[n] is None else self._heads(terms[n]) for n in ("sinks", "alibi")}
        scores, probs = rebuilt(query, key, positions, layer, terms, per_head["sinks"], per_head["alibi"])
        found = (scores if address.name == "attn_scores" else probs).to(query.dtype)
        head = address.coordinate("head")
        return found if head is None else found[head]

    def _heads(self, values: Tensor) -> Tensor:
        return values if self.size == 1 else self.names.all_gather(values[None])[0]
