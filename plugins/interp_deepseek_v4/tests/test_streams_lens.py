"""The lens of trunks of several streams, through a reduction that is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_tools import (
    AT,
    FAR,
    TIGHT,
    hf_logits,
    inner,
)
from trunks import PROMPT

from interp_core import (
    Add,
    Cache,
    CapabilityUnsupported,
    InterpModel,
    RequestError,
    decode_residuals,
    run_with_cache,
)
from interp_core.checks import difference

# Identity 6: the lens.


def finished(trunk: Any, rows: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
    """Logits of rows of the width of one stream, with the model's own modules."""
    backend: Any = trunk.model.session.backend()
    with torch.no_grad():
        rows = rows if trunk.name == "qwen4_exp_text" else inner(trunk).norm(rows)
        logits: torch.Tensor = backend.model.lm_head(rows)
    return 3.0 * torch.tanh(logits / 3.0) if trunk.name == "gemma3n_text" and not raw else logits


def test_identity_6_the_models_own_contraction(trunk: Any, plain: Cache, transformers_model: Any) -> None:
    model, logits = trunk.model, hf_logits(transformers_model(trunk), PROMPT)
    rows = plain["resid_streams.3"][0]
    assert difference(model.decode_residuals(rows, reduction="head"), logits) < TIGHT
    assert difference(model.decode_residuals(rows[-1], reduction="head"), logits[-1]) < TIGHT
    assert difference(decode_residuals(model, rows, reduction="head"), plain["lm_head"][0]) < TIGHT
    assert difference(model.decode_residuals(plain["resid_streams.2"][0], reduction="head"), logits) > FAR
    assert difference(model.decode_residuals(rows.flip(-2), reduction="head"), logits) > FAR or (
        trunk.name == "glm5_next"  # Its contraction is the mean, which knows no order.
    )
    mean = model.decode_residuals(rows, reduction="mean")
    assert (difference(mean, logits) < TIGHT) is (trunk.name == "glm5_next")


def test_identity_6_lens(trunk: Any, plain: Cache, transformers_model: Any) -> None:
    logits = hf_logits(transformers_model(trunk), PROMPT)
    lens = trunk.model.logit_lens(PROMPT, top_k=4, reduction="head")
    best = logits.softmax(-1).topk(4)
    assert lens.layers == (0, 1, 2, 3)
    assert torch.equal(lens.top_ids[-1], best.indices)
    assert difference(lens.top_probs[-1], best.values) < TIGHT
    assert not torch.equal(lens.top_ids[0], best.indices)
    some = trunk.model.logit_lens(PROMPT, layers=[1, 3], top_k=4, positions=[3, AT], reduction="head")
    assert torch.equal(some.top_ids, lens.top_ids[[1, 3]][:, [3, AT]])


def test_reductions_decode_what_they_say(trunk: Any, plain: Cache) -> None:
    model, rows = trunk.model, plain["resid_streams.1"][0]
    wanted = {"mean": rows.mean(-2), "sum": rows.sum(-2), 0: rows[:, 0], 2: rows[:, 2], "stream-1": rows[:, 1]}
    for reduction, row in wanted.items():
        got = model.decode_residuals(rows, reduction=reduction)
        assert difference(got, finished(trunk, row)) < TIGHT, reduction
        assert difference(got, finished(trunk, row.roll(1, 0))) > FAR, reduction
        raw = decode_residuals(model, rows, reduction=reduction)
        assert difference(raw, finished(trunk, row, raw=True)) < TIGHT, reduction
        lens = model.logit_lens(PROMPT, layers=[1], top_k=3, reduction=reduction)
        assert torch.equal(lens.top_ids[0], got.topk(3).indices), reduction
    others = [model.decode_residuals(rows, reduction=r) for r in (0, 1, 2)]
    assert difference(others[0], others[1]) > FAR
    assert difference(others[1], others[2]) > FAR


def test_lens_of_a_steered_run(trunk: Any) -> None:
    vector = 4.0 * torch.linspace(-1, 1, 64)
    steering = [Add("resid_post.3.stream-1", vector)]
    rows = run_with_cache(trunk.model, PROMPT, ["resid_streams.3"], steering=steering)["resid_streams.3"][0]
    lens = trunk.model.logit_lens(PROMPT, layers=[3], top_k=3, reduction="head", steering=steering)
    assert torch.equal(lens.top_ids[0], trunk.model.decode_residuals(rows, reduction="head").topk(3).indices)
    plain = trunk.model.logit_lens(PROMPT, layers=[3], top_k=3, reduction="head")
    assert not torch.equal(lens.top_ids, plain.top_ids)


def test_lens_needs_a_reduction(trunk: Any, plain: Cache) -> None:
    model, rows = trunk.model, plain["resid_streams.3"][0]
    for call in (
        lambda: model.logit_lens(PROMPT),
        lambda: model.decode_residuals(rows),
        lambda: model.decode_residuals(rows[:, 0]),
        lambda: decode_residuals(model, rows),
    ):
        with pytest.raises(CapabilityUnsupported, match="streams") as refused:
            call()
        assert refused.value.capability == "logit_lens"
        assert "reduction" in refused.value.instead
    assert not model.supports("logit_lens")
    assert model.residual_basis.n_streams == model.facts.n_streams
    assert not model.residual_basis.lens_valid


def test_reductions_that_are_none(trunk: Any, plain: Cache) -> None:
    model, rows, n = trunk.model, plain["resid_streams.3"][0], trunk.model.facts.n_streams
    wrong: Any
    for wrong in ("median", "", "HEAD", "stream-", f"stream-{n}", "stream--1", "stream-x", n, -1, 1.5, True, [0], {}):
        with pytest.raises(RequestError, match="reduction"):
            model.decode_residuals(rows, reduction=wrong)
        with pytest.raises(RequestError, match="reduction"):
            model.logit_lens(PROMPT, layers=[0], reduction=wrong)
    for shape in ((n + 1, 64), (3, n + 1, 64), (3, n, 63), (2, 3, n, 64)):
        with pytest.raises(RequestError, match="rows"):
            model.decode_residuals(torch.zeros(shape), reduction="head")
    with pytest.raises(RequestError, match="rows"):
        model.decode_residuals(torch.zeros(3, n, 64, dtype=torch.long), reduction="head")


def test_one_stream_has_nothing_to_reduce(llama: InterpModel) -> None:
    for reduction in ("head", "mean", 0):
        with pytest.raises(RequestError, match="one residual stream"):
            llama.logit_lens(PROMPT, reduction=reduction)
        with pytest.raises(RequestError, match="one residual stream"):
            llama.decode_residuals(torch.zeros(2, 64), reduction=reduction)
    assert llama.logit_lens(PROMPT[:5]).top_ids.shape == (4, 5, 5)
