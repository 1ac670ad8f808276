"""Batches and generation on trunks of several streams."""

from __future__ import annotations

from typing import Any

import torch
from stream_tools import (
    FAR,
    TIGHT,
    hf_logits,
    served,
)
from trunks import PROMPT, ids_of

from interp_core import (
    Add,
    run_with_cache,
)
from interp_core.checks import difference

# Batches and generation.


def batch_points(trunk: Any) -> list[str]:
    chosen = [a for a in served(trunk.model) if a.split(".")[0] not in ("attn_scores", "attn_probs")]
    return [a for a in chosen if a.split(".")[-1] != "stream-3"]


def test_unequal_prompts_in_one_call_equal_one_by_one(trunk: Any) -> None:
    model, points = trunk.model, batch_points(trunk)
    rows = [PROMPT, ids_of(3, 1), ids_of(10, 2)]
    batch = run_with_cache(model, rows, points)
    width = len(PROMPT) + 2
    padded, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    left = run_with_cache(model, padded, points, attention_mask=mask)
    assert batch.lengths == left.lengths == (21, 3, 10)
    assert left.offsets == (2, 20, 13)
    for i, row in enumerate(rows):
        alone = run_with_cache(model, row, points)
        other = run_with_cache(model, ids_of(len(row), 9), points)
        for key in points:
            assert left[key].shape[1] == width
            for got in (batch[key][i, : len(row)], left[key][i, -len(row) :]):
                assert difference(got.float(), alone[key][0].float()) < TIGHT, (key, len(row))
            if "stream_mix" not in key and "expert" not in key:
                assert difference(other[key].float(), alone[key].float()) > 10 * TIGHT, key
            assert not bool(batch[key][i, len(row) :].any()), key
            assert not bool(left[key][i, : -len(row)].any()), key


def test_capture_while_generating_equals_one_run(trunk: Any, transformers_model: Any) -> None:
    model, points = trunk.model, batch_points(trunk)
    completion, grown = model.capture_generation(PROMPT[:10], points, max_tokens=12, ignore_eos=True)
    assert len(completion.token_ids) == 12
    ids = [*PROMPT[:10], *completion.token_ids[:-1]]
    once = run_with_cache(model, ids, points)
    for key in points:
        assert difference(grown[key].float(), once[key].float()) < TIGHT, key
        assert difference(grown[key][:, :-1].float(), once[key][:, 1:].float()) > TIGHT or "stream_mix" in key, key
    whole = transformers_model(trunk)
    with torch.no_grad():
        own = whole.generate(
            torch.tensor([PROMPT[:10]]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert own[0, 10:].tolist() == list(completion.token_ids)
    assert list(model.generate(PROMPT[:10], max_tokens=12, ignore_eos=True).token_ids) == list(completion.token_ids)
    assert hf_logits(whole, ids)[9:].argmax(-1).tolist() == list(completion.token_ids)


def test_a_steered_generation_is_steered_at_each_step(trunk: Any) -> None:
    steering = [Add("resid_post.1.stream-1", 3.0 * torch.linspace(-1, 1, 64))]
    points = ["resid_streams.1", "resid_streams.3"]
    completion, grown = trunk.model.capture_generation(
        PROMPT[:10], points, max_tokens=8, ignore_eos=True, steering=steering
    )
    ids = [*PROMPT[:10], *completion.token_ids[:-1]]
    once = run_with_cache(trunk.model, ids, points, steering=steering)
    without = run_with_cache(trunk.model, ids, points)
    for key in points:
        assert difference(grown[key], once[key]) < TIGHT
        assert difference(grown[key][:, -1], without[key][:, -1]) > FAR
