"""What single older families have of their own: a recurrence, layers of the head, positions behind the padding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checks import TIGHT, check_logits, check_writes, hf_logits, module
from older_families import OLDER, rwkv
from tiny_families import PROMPT, write

from interp_core import (
    CapabilityUnsupported,
    InterpModel,
    RequestError,
    direct_attribution,
    load_model,
    run_with_cache,
)
from interp_core.checks import difference


@pytest.fixture(scope="module")
def recurrent(folders: Path) -> Iterator[InterpModel]:
    """An RWKV of four blocks whose residual is halved after every two."""
    with load_model(write(rwkv, folders / "older-rwkv"), backend="eager", dtype="float32") as model:
        yield model


def test_a_recurrence_is_proven_and_has_no_softmax(recurrent: InterpModel) -> None:
    found = recurrent.verify(PROMPT)
    assert found.ok, found.failed()
    assert set(found.points.values()) == {"proven", "absent"}
    with pytest.raises(CapabilityUnsupported, match="recurrent"):
        run_with_cache(recurrent, PROMPT, ["attn_probs.1"])


def test_its_residual_begins_behind_a_norm_and_is_halved_in_between(recurrent: InterpModel) -> None:
    cache = run_with_cache(recurrent, PROMPT, ["embeddings", "resid_pre.*", "resid_post.*"])
    norm = module(recurrent, "block_in", 0)
    with torch.no_grad():
        assert torch.equal(norm(cache["embeddings"]), cache["resid_pre.0"])
    for layer, halved in enumerate((False, True, False)):
        after, following = cache[f"resid_post.{layer}"], cache[f"resid_pre.{layer + 1}"]
        assert torch.equal(0.5 * after if halved else after, following)
    assert not recurrent.residual_basis.additive
    assert "halved" in recurrent.residual_basis.blockers[0]


def test_its_lens_and_its_writes(recurrent: InterpModel) -> None:
    check_logits(recurrent)
    check_writes(recurrent, {None, 0, 1, 3})


def test_it_keeps_no_cache_and_says_so(recurrent: InterpModel) -> None:
    with pytest.raises(RequestError, match="keeps no key/value cache"):
        recurrent.generate(PROMPT, max_tokens=2)


@pytest.mark.parametrize("name", ["bert", "electra", "rembert", "roberta", "megatron-bert"])
def test_the_lens_goes_through_the_layers_of_the_head(name: str, folders: Path) -> None:
    with load_model(write(OLDER[name], folders / f"older-{name}"), backend="eager", dtype="float32") as model:
        last = run_with_cache(model, PROMPT, ["resid_post.3", "lm_head"])
        rows = last["resid_post.3"][0]
        assert difference(model.decode_residuals(rows), hf_logits(model, PROMPT)) < TIGHT
        assert difference(last["lm_head"][0], hf_logits(model, PROMPT)) < TIGHT
        bare = module(model, "lm_head", None)
        normed = module(model, "final_norm", None)(rows) if model.facts.final_norm else rows
        if bare.in_features == normed.shape[-1]:
            with torch.no_grad():
                assert difference(bare(normed), hf_logits(model, PROMPT)) > 10 * TIGHT


@pytest.mark.parametrize(("name", "why"), [("bart", "normalises the sum"), ("megatron-bert", "not linear")])
def test_shares_of_a_logit_are_refused_where_nothing_adds_up(name: str, why: str, folders: Path) -> None:
    folder = write(OLDER[name], folders / f"older-{name}")
    with (
        load_model(folder, backend="eager", dtype="float32") as model,
        pytest.raises(CapabilityUnsupported, match=why),
    ):
        direct_attribution(model, PROMPT, 7)


@pytest.mark.parametrize("name", ["bloom", "mpt", "pegasus"])
def test_shares_of_a_logit_add_up_where_modules_hold_the_residual(name: str, folders: Path) -> None:
    with load_model(write(OLDER[name], folders / f"older-{name}"), backend="eager", dtype="float32") as model:
        found = direct_attribution(model, PROMPT, 7, heads=True)
        assert float(found.shares.sum()) == pytest.approx(found.logit, rel=1e-4, abs=1e-4)
        assert found.logit == pytest.approx(float(hf_logits(model, PROMPT)[-1, 7]), rel=1e-4, abs=1e-4)


def test_a_prompt_up_to_the_positions_behind_the_padding_token(folders: Path) -> None:
    with load_model(write(OLDER["roberta"], folders / "older-roberta"), backend="eager", dtype="float32") as model:
        assert model.facts.max_positions == 64
        full = [5 + i for i in range(64)]
        assert run_with_cache(model, full, ["lm_head"])["lm_head"].shape[1] == 64
        with pytest.raises(RequestError, match="64"):
            run_with_cache(model, [*full, 7], ["lm_head"])
