"""Declared taps under CUDA graphs: the checks of ``test_static`` that a GPU changes. Skipped only without a GPU."""

from __future__ import annotations

import pytest
import torch
from vllm_families import PROMPTS, Loader

from interp_core import Add, run_with_cache
from interp_core.checks import difference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="replayed graphs need a GPU"),
]


def test_taps_and_writes_hold_in_a_replayed_graph(loaded: Loader) -> None:
    static = loaded("mistral", "vllm-static", device="cuda", static_points=["resid_post.*", "z.1"])
    hooked = loaded("mistral", device="cuda")
    steering = [Add("resid_post.1", torch.linspace(-1, 1, static.d_model), scale=3.0)]
    for prompts in (PROMPTS, [PROMPTS[0]], [[5]] * 3):
        for operations in (None, steering):
            found, wanted = (
                run_with_cache(m, prompts, list(static.static_points), steering=operations) for m in (static, hooked)
            )
            assert all(difference(found[a], wanted[a]) < 1e-4 for a in found)
    mine, theirs = (m.generate(PROMPTS, max_tokens=20, steering=steering) for m in (static, hooked))
    assert [c.token_ids for c in mine] == [c.token_ids for c in theirs]
