"""Maths on a cache: layers, heads, positions, dtypes and arrays, held against captures and against plain indexing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from interp_core import AddressError, Cache, InterpModel, ModelUnavailable, RequestError, load_model
from interp_core.address import Address
from interp_core.durable import partial_files, replacing
from interp_core.testing.tiny import write_family

torch.set_num_threads(1)
PROMPTS = [[5, 9, 11, 5, 77], [120, 42, 8], [200, 31, 64, 7]]
POINTS = ["resid_post.*", "z.*", "value.1", "attn_scores.*", "attn_probs.1", "mlp_act.0", "embeddings"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InterpModel]:
    folder = write_family("llama", tmp_path_factory.mktemp("cache"))
    with load_model(str(folder), "eager", dtype="float32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def cache(model: InterpModel) -> Cache:
    return model.run_with_cache(PROMPTS, POINTS)


def same(one: Cache, other: Cache) -> None:
    assert list(one) == list(other)
    for address in one:
        torch.testing.assert_close(one[address], other[address], rtol=0, atol=2e-5)
    for name in ("tokens", "lengths", "offsets", "positions", "entries", "model_id"):
        assert getattr(one, name) == getattr(other, name)


# Layers and heads.


def test_a_stack_says_which_layers_it_has(cache: Cache) -> None:
    assert cache.stack("resid_post").shape == (2, 3, 5, 96)
    assert torch.equal(cache.stack("resid_post")[1], cache["resid_post.1"])
    assert cache.layers("resid_post") == cache.layers("resid_post.*") == (0, 1)
    assert cache.layers("resid_post.1") == cache.layers("resid_post.1-7") == cache.layers("value") == (1,)
    assert cache.stack("resid_post.1-1").shape == (1, 3, 5, 96)
    assert cache.layers("z.*.head-3") == (0, 1)
    assert cache.layers("embeddings") == ()
    for absent in ("embeddings", "resid_post.5", "z.*.kv_head-0", "q_norm_out"):
        with pytest.raises(AddressError, match="at any layer"):
            cache.stack(absent)


def test_coordinates_of_a_whole_point_are_here(cache: Cache) -> None:
    assert torch.equal(cache["z.1.head-3"], cache["z.1"][:, :, 3])
    assert torch.equal(cache["value.1.kv_head-1"], cache["value.1"][:, :, 1])
    assert torch.equal(cache["mlp_act.0.neuron-7"], cache["mlp_act.0"][..., 7])
    assert torch.equal(cache["attn_scores.0.head-2"], cache["attn_scores.0"][:, 2])
    assert not torch.equal(cache["z.1.head-3"], cache["z.1"][:, :, 2])
    assert "z.1.head-3" in cache
    assert len(cache) == len(list(cache)) == 10
    for absent in ("z.1.neuron-0", "resid_post.0.stream-0", "value.0.kv_head-0"):
        assert absent not in cache
    with pytest.raises(AddressError, match="head counts from 0 to 3"):
        cache["z.1.head-4"]
    assert cache.key_labels("attn_scores.0.head-2") == [f"token {i}" for i in range(5)]


def test_a_coordinate_is_a_copy(cache: Cache) -> None:
    before = cache["z.1"].clone()
    cache["z.1.head-3"].fill_(9.0)
    assert torch.equal(cache["z.1"], before)


def test_heads_of_every_kind(model: InterpModel, cache: Cache) -> None:
    z = cache.stack("z")
    assert torch.equal(cache.heads("z", 3), z[:, :, :, 3])
    assert torch.equal(cache.heads("z", [3, 0]), z[:, :, :, [3, 0]])
    assert torch.equal(cache.heads("z", range(4)), z)
    assert cache.heads("z", [2]).shape == (2, 3, 5, 1, 32)
    assert torch.equal(cache.heads("value", 1), cache["value.1"][None, :, :, 1])
    assert torch.equal(cache.heads("attn_scores", [1, 2]), cache.stack("attn_scores")[:, :, [1, 2]])
    some = model.run_with_cache(PROMPTS, ["z.*.head-3"])
    torch.testing.assert_close(some.heads("z", 3), cache.heads("z", 3), rtol=0, atol=0)
    with pytest.raises(AddressError, match="at any layer"):
        some.heads("z", 2)


@pytest.mark.parametrize("head", [-1, True, 1.0, "1", [], [0, None]])
def test_what_is_no_head(cache: Cache, head: Any) -> None:
    with pytest.raises(RequestError, match="a head is a number"):
        cache.heads("z", head)


def test_points_without_heads(cache: Cache) -> None:
    for name in ("resid_post", "mlp_act", "nonsense"):
        with pytest.raises(AddressError, match="has no heads"):
            cache.heads(name, 0)


# Positions.


@pytest.mark.parametrize("positions", ["last", [2, 0], slice(1, None), slice(3, None), 1, slice(9, 12)], ids=str)
def test_rows_at_positions_are_those_of_a_capture_of_them(model: InterpModel, cache: Cache, positions: Any) -> None:
    same(cache.at(positions), model.run_with_cache(PROMPTS, POINTS, positions=positions))


def test_positions_of_left_padded_prompts_are_the_prompts_own(model: InterpModel) -> None:
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    padded = model.run_with_cache(ids, POINTS, attention_mask=mask)
    assert padded.offsets == (0, 2, 1)
    same(padded.at([0, 2]), model.run_with_cache(PROMPTS, POINTS, positions=[0, 2]))


def test_positions_are_absolute_in_a_cache_of_some(model: InterpModel, cache: Cache) -> None:
    some = model.run_with_cache(PROMPTS, POINTS, positions=[2, 0])
    same(some.at(0), cache.at(0))
    with pytest.raises(RequestError, match=r"prompt 0: positions \[1\] are not in this cache, which holds \[2, 0\]"):
        some.at(1)
    with pytest.raises(RequestError, match="positions 0 to 2"):
        cache.at(3)
    assert cache.at(None) is not cache
    same(cache.at(None), cache)


def test_rows_of_a_generation(model: InterpModel) -> None:
    _, cache = model.capture_generation(PROMPTS, ["resid_post.1"], max_tokens=3)
    assert cache.lengths == (7, 5, 6)
    last = cache.at("last")["resid_post.1"]
    assert torch.equal(last[:, 0], torch.stack([cache["resid_post.1"][i, n - 1] for i, n in enumerate(cache.lengths)]))


# Arrays, dtypes, devices.


def test_arrays_keep_dtypes_but_bfloat16(cache: Cache) -> None:
    arrays = cache.numpy()
    assert list(arrays) == [str(a) for a in cache]
    assert all(np.array_equal(arrays[str(a)], cache[a].numpy()) for a in cache)
    half, brain = cache.to(dtype="float16").numpy(), cache.to(dtype=torch.bfloat16)
    assert half["z.1"].dtype == np.float16
    assert brain.numpy()["z.1"].dtype == np.float32
    assert torch.equal(torch.from_numpy(brain.numpy()["z.1"]).bfloat16(), brain["z.1"])
    graph = Cache({Address("resid_post", 0): torch.ones(1, 2, 3, requires_grad=True)})
    assert graph.numpy()["resid_post.0"].sum() == 6


def test_to_keeps_everything_else(cache: Cache) -> None:
    moved = cache.to("meta", torch.float16)
    assert (moved["z.1"].device.type, moved["z.1"].dtype) == ("meta", torch.float16)
    assert (moved.tokens, moved.lengths, moved.model_id) == (cache.tokens, cache.lengths, cache.model_id)
    assert cache["z.1"].dtype == torch.float32
    indices = Cache({Address("expert_indices", 0): torch.ones(1, 2, 3, dtype=torch.long)})
    assert indices.to(dtype="float16")["expert_indices.0"].dtype == torch.long


def test_a_cast_loses_no_value(cache: Cache) -> None:
    assert bool(cache.to(dtype="float16")["attn_scores.0"].isneginf().any())
    large = Cache({Address("resid_post", 0): torch.tensor([[[7e4, 1.0]]])})
    assert float(large.to(dtype="bfloat16")["resid_post.0"].max()) > 6e4
    with pytest.raises(RequestError, match=r"resid_post\.0 holds values up to 7e\+04"):
        large.to(dtype="float16")


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"dtype": "auto"}, {"dtype": 3}, {"device": "nowhere"}])
def test_no_such_dtype_or_device(cache: Cache, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        cache.to(**wrong)


# Files.


def test_a_file_holds_what_a_cache_knows(model: InterpModel, cache: Cache, tmp_path: Path) -> None:
    again = Cache.load(cache.at([2, 0]).save(tmp_path / "c.safetensors"))
    same(again, cache.at([2, 0]))
    assert again.model_id == model.model_id
    with safe_open(str(tmp_path / "c.safetensors"), framework="pt") as file:
        meta = json.loads(file.metadata()["interp_cache"])
    assert meta["format"] == 1
    assert meta["versions"]["torch"] == torch.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def rewritten(path: Path, target: Path, **changes: Any) -> Path:
    with safe_open(str(path), framework="pt") as file:
        meta = {**json.loads(file.metadata()["interp_cache"]), **changes}
    save_file(load_file(path), target, metadata={"interp_cache": json.dumps(meta)})
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format 2, and this release"),
        ({"lengths": [5, 3]}, "number of prompts"),
        ({"lengths": [6, 3, 4]}, "which its layout does not describe"),
        ({"lengths": [5, 3, -1]}, "whole numbers"),
        ({"tokens": [[1]]}, "number of prompts"),
        ({"offsets": "abc"}, "whole numbers"),
        ({"positions": 3}, "cannot be read"),
        ({"entries": []}, "cannot be read"),
        ({"entries": {"no address!": [1]}}, "cannot be read"),
        ({"model_id": 4}, "model_id"),
        ({"addresses": ["resid_post.0"]}, "does not hold the tensors"),
    ],
    ids=str,
)
def test_a_spoiled_layout_is_one_error(cache: Cache, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    saved = cache.save(tmp_path / "c")
    same(Cache.load(rewritten(saved, tmp_path / "control")), cache)
    with pytest.raises(ModelUnavailable, match=words):
        Cache.load(rewritten(saved, tmp_path / "spoiled", **changes))


def test_a_file_of_before_formats_were_written_still_loads(cache: Cache, tmp_path: Path) -> None:
    saved = cache.save(tmp_path / "c")
    with safe_open(str(saved), framework="pt") as file:
        meta = json.loads(file.metadata()["interp_cache"])
    old = {key: meta[key] for key in ("tokens", "lengths", "offsets", "positions")}
    save_file(load_file(saved), tmp_path / "old", metadata={"interp_cache": json.dumps(old)})
    assert Cache.load(tmp_path / "old").lengths == cache.lengths


def test_a_failed_save_leaves_the_old_file(cache: Cache, tmp_path: Path) -> None:
    path = cache.save(tmp_path / "c")
    before = path.read_bytes()
    with pytest.raises(RequestError, match="empty"):
        Cache({}).save(path)
    wrong = Cache({Address("resid_post", 0): torch.ones(1, 2, 3).to_sparse()})
    with pytest.raises((RequestError, ValueError, RuntimeError)):
        wrong.save(path)
    assert path.read_bytes() == before
    with pytest.raises(RequestError, match="cannot be written"):
        cache.save(tmp_path / "no such folder" / "c")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match="cannot be written"):
        cache.save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "folder"]


def test_a_link_stays_a_link(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "c")
    cache.save(link)
    assert link.is_symlink()
    assert (tmp_path / "real" / "c").is_file()


def test_what_a_killed_writer_leaves_is_known_by_name(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def write() -> None:
        with replacing(tmp_path / "a.b") as part:
            part.write_text("half")
            assert partial_files(tmp_path) == {part: "a.b"}
            assert str(threading.get_ident()) in part.name
            raise Killed

    with pytest.raises(Killed):
        write()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".profile").write_text("")
    assert partial_files(tmp_path) == {}
