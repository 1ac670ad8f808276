"""A harvest: what it holds, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from interp_core import Add, AddressError, Harvest, InterpModel, RequestError, load_harvest, load_model
from interp_core.harvest_settings import read_plan
from tests.unit.harvest.settings import POINTS, QUIET, ROWS, equal

# What it holds.


def test_it_is_what_captures_of_its_batches_are(model: InterpModel, held: Harvest) -> None:
    assert (len(held), held.complete, held.n_rows, held.truncated) == (7, True, 24, 0)
    assert [shard.texts for shard in held.index.shards] == [4, 3]
    assert list(map(str, held.addresses)) == [str(a) for a in model.profile.addresses(POINTS)]
    for start in range(0, 7, 2):
        batch = model.run_with_cache(ROWS[start : start + 2], POINTS)
        for i in range(len(batch.tokens)):
            equal(held[start + i], batch, i)
    assert not torch.equal(held[0]["z.1"][0, 0], held[1]["z.1"][0, 0])
    assert held[-1].tokens == (tuple(ROWS[-1]),)
    assert [held.tokens(i) for i in range(7)] == list(map(tuple, ROWS))
    assert [c.tokens[0] for c in held] == list(map(tuple, ROWS))
    assert held[3].model_id == held.model_id == model.model_id


def test_rows_come_shard_by_shard(held: Harvest) -> None:
    parts = list(held.rows("resid_post.1"))
    assert [tuple(p.shape) for p in parts] == [(13, 96), (11, 96)]
    assert torch.equal(torch.cat(parts), torch.cat([held[i]["resid_post.1"][0] for i in range(7)]))
    assert torch.equal(torch.cat(list(held.rows("z.1.head-2"))), torch.cat(list(held.rows(("z", 1))))[:, 2])
    for wrong, words in (("resid_post.9", "not in this harvest"), ("attn_scores.0", "h\\[i\\] has it")):
        with pytest.raises(AddressError, match=words):
            held.rows(wrong)


def test_a_harvest_opens_from_its_folder(held: Harvest, model: InterpModel) -> None:
    for again in (load_harvest(held.path), Harvest.open(str(held.path))):
        equal(again[2], model.run_with_cache(ROWS[2:4], POINTS), 0)
        assert repr(again).startswith("<Harvest ")
        assert "7 texts, 24 rows" in repr(again)
    assert held.settings["batch_size"] == 2
    versions = held.settings["versions"]
    assert {"interp-core", "interp-eager", "torch", "transformers"} <= set(versions)
    assert "rich" not in versions, "what computes nothing may be updated between two runs"


@pytest.mark.parametrize("number", [7, -8, True, 1.0, "1", slice(0, 2), None])
def test_a_text_that_is_not_there(held: Harvest, number: Any) -> None:
    with pytest.raises(RequestError, match="from 0 to 6"):
        held[number]
    with pytest.raises(RequestError, match="from 0 to 6"):
        held.tokens(number)


@pytest.mark.parametrize("positions", ["last", 0, [0], slice(1, 3), slice(-2, None)], ids=str)
def test_positions(model: InterpModel, tmp_path: Path, positions: Any) -> None:
    found = model.harvest(ROWS, POINTS, tmp_path / "h", positions=positions, **QUIET)
    for start in range(0, 7, 2):
        batch = model.run_with_cache(ROWS[start : start + 2], POINTS, positions=positions)
        for i in range(len(batch.tokens)):
            equal(found[start + i], batch, i)
    assert sum(len(part) for part in found.rows("z.1")) == found.n_rows


def test_steering_and_blocks_of_it(model: InterpModel, tmp_path: Path) -> None:
    add = Add("resid_post.0", torch.ones(96), scale=3.0)
    given = model.harvest(ROWS[:2], ["resid_post.1"], tmp_path / "a", steering=add, **QUIET)
    with model.steer([add]):
        around = model.harvest(ROWS[:2], ["resid_post.1"], tmp_path / "b", **QUIET)
    plain = model.harvest(ROWS[:2], ["resid_post.1"], tmp_path / "c", **QUIET)
    steered = model.run_with_cache(ROWS[:2], ["resid_post.1"], steering=add)
    for i in range(2):
        equal(given[i], steered, i)
        equal(around[i], steered, i)
        assert float((plain[i]["resid_post.1"] - given[i]["resid_post.1"]).abs().max()) > 0.5


def test_dtype_on_disk(model: InterpModel, tmp_path: Path) -> None:
    points = ["resid_post.1", "attn_scores.0"]
    found = model.harvest(ROWS, points, tmp_path / "h", dtype="bfloat16", **QUIET)
    full = model.run_with_cache(ROWS[:2], points)
    assert torch.equal(found[0]["resid_post.1"][0], full["resid_post.1"][0].bfloat16())
    assert found.index.points["resid_post.1"] == {"dtype": "bfloat16", "axes": [96], "pairwise": False}
    assert bool(found[0]["attn_scores.0"].isneginf().any())
    large = Add("resid_post.0", torch.ones(96), scale=1e6)
    with pytest.raises(RequestError, match=r"resid_post\.0 holds values up to 1e\+06"):
        model.harvest(ROWS, ["resid_post.0"], tmp_path / "i", dtype="float16", steering=large, **QUIET)


def test_modules_of_the_model_itself(model: InterpModel, tmp_path: Path) -> None:
    found = model.harvest(ROWS, ["path.model.layers.0.mlp", "mlp_out_post.0"], tmp_path / "h", **QUIET)
    (one, two) = (torch.cat(list(found.rows(a))) for a in found.addresses)
    assert torch.equal(one, two)


def test_a_default_shard_holds_few_long_texts_or_many_short_ones(model: InterpModel, tmp_path: Path) -> None:
    LlamaConfig(hidden_size=4096, num_hidden_layers=32, max_position_embeddings=8192).save_pretrained(tmp_path / "m")
    large = load_model(str(tmp_path / "m"), "eager")

    def size(points: list[str], batch: int = 8, length: int | None = None) -> int:
        settings = {"positions": None, "batch_size": batch, "shard_size": None, "max_length": length, "dtype": None}
        return read_plan(large, large.profile.addresses(points), (), **settings).shard_size

    assert size(["resid_post.3"]) == 16  # of 2,048 rows of 16 KiB each
    assert size(["resid_post.3"], length=1024) == 32
    assert size(["resid_post.3"], length=8192) == 8
    assert size(["resid_post.*"]) == 8  # one batch, though it is more
    assert size(["resid_post.*"], batch=3) == 3
    assert size(["path.model.norm", "mlp_act.0.neuron-3"], length=16) == 1024
    assert size(["attn_scores.0"]) == 8
    assert model.harvest(ROWS, ["z.1"], tmp_path / "h", progress=False).settings["shard_size"] == 1024
