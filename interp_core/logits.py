"""The end of the unembedding: what a family does to the bare logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interp_core.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["finished"]


def finished(logits: Tensor, facts: ModelFacts) -> Tensor:
    """The family's own end of the unembedding, once: multiplier, softcap, and tokens that it never gives."""
    if facts.logit_multiplier != 1.0:
        logits = logits * facts.logit_multiplier
    if facts.final_softcap is not None:
        logits = (logits / facts.final_softcap).tanh() * facts.final_softcap
    if facts.masked_tokens:
        import torch

        masked = torch.tensor(facts.masked_tokens, device=logits.device)
        logits = logits.index_fill(-1, masked, torch.finfo(logits.dtype).min)
    return logits
