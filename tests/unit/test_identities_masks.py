"""Identities of keys that a query chooses, and of chunks."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from interp_core import LayerFacts, ModelFacts
from interp_core.checks import Check
from interp_core.identities_attention import attention_identities

HEADS, WIDTH, SEQ = 4, 6, 12
LAYER = LayerFacts(index=0, n_heads=HEADS, n_kv_heads=HEADS, head_dim=WIDTH, v_head_dim=WIDTH, d_mlp=8)
FACTS = ModelFacts(model_type="made_up", structure_known=True, n_layers=1, d_model=12, vocab_size=9, layers=[LAYER])


def mask_check(layer: LayerFacts, seen: torch.Tensor) -> Check:
    """The identity of the mask, over equal scores of what is seen, ``[heads, query, key]``."""
    scores = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    tensors = {"attn_scores": scores, "attn_probs": scores.softmax(-1).nan_to_num()}
    found = attention_identities(FACTS, layer, lambda name, at: tensors.get(name), 2e-5)
    return next(check for check in found if check.tolerance == 0.0)


def chosen(count: int, block: int, *, seed: int = 0) -> torch.Tensor:
    """For each head and query, ``count`` blocks of keys among those that have begun."""
    random = torch.Generator().manual_seed(seed)
    seen = torch.zeros(HEADS, SEQ, SEQ, dtype=torch.bool)
    for head in range(HEADS):
        for query in range(SEQ):
            for which in torch.randperm(query // block + 1, generator=random)[:count].tolist():
                seen[head, query, which * block : (which + 1) * block] = True
    return seen & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()


@pytest.mark.parametrize(("count", "block"), [(3, 1), (1, 1), (2, 4), (2, 5)])
def test_keys_that_are_chosen_are_counted(count: int, block: int) -> None:
    layer, seen = evolve(LAYER, key_budget=count, key_block=block), chosen(count, block)
    assert mask_check(layer, seen).proof
    assert mask_check(evolve(layer, key_budget=count + 1), seen).fails
    assert mask_check(evolve(layer, key_budget=None), seen[:1]).fails
    early = seen.clone()
    early[0, 2, 9] = True
    assert mask_check(layer, early).fails, "a key that the query may not see"
    if block > 1:
        part = seen.clone()
        part[1, SEQ - 1, int(seen[1, SEQ - 1].nonzero()[0])] = False
        assert mask_check(layer, part).fails, "a block of which one key is missing"


def test_chunks_are_no_windows() -> None:
    at = torch.arange(SEQ)
    seen = ((at[:, None] // 5 == at[None] // 5) & (at[:, None] >= at[None])).expand(HEADS, SEQ, SEQ)
    layer = evolve(LAYER, mixer="chunked_attention", window=5)
    assert mask_check(layer, seen).proof
    assert mask_check(evolve(layer, mixer="sliding_attention"), seen).fails
    assert mask_check(evolve(layer, window=4), seen).fails
