"""The cache: rows put into the caller's layout, a mapping, and a file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from interp_core import AddressError, ModelUnavailable, RequestError
from interp_core.address import Address
from interp_core.assembly import assemble
from interp_core.cache import Cache
from interp_core.requests import ForwardResult
from interp_core.tokens import TokenBatch

torch.set_num_threads(1)
RESID, SCORES, PROBS = Address("resid_post", 0), Address("attn_scores", 0), Address("attn_probs", 0)
INF = float("inf")
PAIRS = {SCORES: -INF, PROBS: 0.0}


def rows(length: int, start: int = 1) -> Tensor:
    return torch.arange(start, start + length).float()[:, None].expand(length, 3).clone()


def matrix(length: int) -> Tensor:
    return torch.ones(2, length, length).tril()


def put(batch: TokenBatch, found: list[dict[Address, Tensor]], positions: Any = None, tokens: Any = None) -> Cache:
    results = [ForwardResult(rows=r) for r in found]
    return assemble(batch, tokens or batch.rows, results, positions or [None] * len(found), PAIRS, list(found[0]))


def batch(*lengths: int, offsets: tuple[int, ...] | None = None, width: int | None = None) -> TokenBatch:
    return TokenBatch(
        rows=[tuple(range(n)) for n in lengths],
        offsets=offsets or (0,) * len(lengths),
        width=width or max(lengths),
        single=len(lengths) == 1,
    )


def test_left_padding() -> None:
    cache = put(batch(2, 4, offsets=(2, 0)), [{RESID: rows(2)}, {RESID: rows(4)}])
    assert cache[RESID][..., 0].tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert cache.mask().tolist() == [[False, False, True, True], [True] * 4]
    assert (cache.lengths, cache.offsets, cache.positions) == ((2, 4), (2, 0), None)


def test_right_padding_keeps_the_callers_width() -> None:
    cache = put(batch(2, 3, width=5), [{RESID: rows(2)}, {RESID: rows(3)}])
    assert cache[RESID][..., 0].tolist() == [[1, 2, 0, 0, 0], [1, 2, 3, 0, 0]]
    assert cache.mask().sum(1).tolist() == [2, 3]


def test_chosen_positions_are_rows_without_padding_between() -> None:
    cache = put(batch(4, 2, offsets=(0, 2)), [{RESID: rows(2)}, {RESID: rows(1)}], [(3, 1), (0,)])
    assert cache[RESID][..., 0].tolist() == [[1, 2], [1, 0]]
    assert (cache.positions, cache.lengths, cache.offsets) == (((3, 1), (0,)), (2, 1), (0, 0))
    assert cache.mask().tolist() == [[True, True], [True, False]]


def test_attention_matrices() -> None:
    found = [{SCORES: matrix(n), PROBS: matrix(n)} for n in (2, 3)]
    cache = put(batch(2, 3, offsets=(1, 0)), found)
    assert cache[SCORES].shape == (2, 2, 3, 3)
    assert cache[SCORES][0, 1].tolist() == [[0, 0, 0], [-INF, 1, 0], [-INF, 1, 1]]
    assert cache[PROBS][0, 0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert torch.equal(cache[PROBS][1], matrix(3))
    assert cache.mask().tolist() == [[False, True, True], [True] * 3]


def test_attention_matrices_of_chosen_queries_have_all_keys() -> None:
    found = [{SCORES: matrix(n)[:, -1:]} for n in (2, 4)]
    cache = put(batch(2, 4), found, [(1,), (3,)])
    assert cache[SCORES].shape == (2, 2, 1, 4)
    assert cache[SCORES][0, 0].tolist() == [[1, 1, -INF, -INF]]


def test_whole_batches_are_not_copied_again() -> None:
    base = torch.randn(2, 4, 3)
    cache = put(batch(4, 4), [{RESID: base[0]}, {RESID: base[1]}])
    assert cache[RESID].data_ptr() == base.data_ptr()
    backwards = put(batch(4, 4), [{RESID: base[1]}, {RESID: base[0]}])
    assert torch.equal(backwards[RESID], base.flip(0))


def test_dtype_and_graph_are_kept() -> None:
    assert put(batch(2), [{RESID: rows(2).bfloat16()}])[RESID].dtype == torch.bfloat16
    row = rows(2).requires_grad_()
    put(batch(2, 3), [{RESID: row}, {RESID: rows(3)}])[RESID].sum().backward()
    assert row.grad is not None


def test_generated_rows_may_go_beyond_the_prompt() -> None:
    cache = put(batch(2), [{RESID: rows(4)}], tokens=[(0, 1, 7, 8)])
    assert (cache[RESID].shape, cache.tokens) == ((1, 4, 3), ((0, 1, 7, 8),))


@pytest.fixture
def cache() -> Cache:
    tensors = {Address("resid_post", i): torch.full((1, 2, 3), float(i)) for i in (0, 10, 2)}
    tensors[Address("z", 1, [("head", 2)])] = torch.ones(1, 2, 4)
    return Cache(tensors, ((5, 6),), (2,), (0,))


def test_it_is_a_mapping(cache: Cache) -> None:
    assert len(cache) == 4
    assert list(map(str, cache)) == ["resid_post.0", "resid_post.10", "resid_post.2", "z.1.head-2"]
    assert cache["resid_post.2"] is cache[("resid_post", 2)] is cache[Address("resid_post", 2)]
    assert "z.1.head-2" in cache
    assert "z.1" not in cache
    assert "not an address!" not in cache
    assert 3 not in cache
    assert cache.get("z.1.head-2") is cache["z.1.head-2"]
    assert [a for a, _ in cache.items()] == list(cache.keys())
    assert repr(cache).startswith("Cache(resid_post.0: [1, 2, 3], ")
    assert not Cache({})
    assert repr(Cache({})) == "Cache()"


def test_get_has_a_default(cache: Cache) -> None:
    assert cache.get("z.1") is None
    assert cache.get(("resid_post", 1), 5) == 5


def test_what_is_not_here(cache: Cache) -> None:
    with pytest.raises(AddressError, match=r"'resid_post\.3'.*Valid: resid_post"):
        cache["resid_post.3"]
    with pytest.raises(AddressError, match="not an address"):
        cache[3]


def test_layers_and_stack(cache: Cache) -> None:
    assert cache.layers("resid_post") == (0, 2, 10)
    assert cache.layers("z") == ()
    assert cache.stack("resid_post")[:, 0, 0, 0].tolist() == [0, 2, 10]
    with pytest.raises(AddressError, match="at any layer"):
        cache.stack("z")
    uneven = Cache({Address("mlp_act", i): torch.ones(1, 2, 3 + i) for i in range(2)})
    with pytest.raises(RequestError, match="does not stack"):
        uneven.stack("mlp_act")


@pytest.mark.parametrize("positions", [None, ((0, 4),)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_brings_back_everything(cache: Cache, tmp_path: Path, positions: Any, dtype: torch.dtype) -> None:
    tensors = {a: t.to(dtype).transpose(1, 2) for a, t in cache.items()}
    saved = Cache(tensors, cache.tokens, cache.lengths, cache.offsets, positions)
    again = Cache.load(saved.save(tmp_path / "c.safetensors"))
    assert set(again) == set(saved)
    assert all(torch.equal(again[a], saved[a]) and again[a].dtype == dtype for a in saved)
    for name in ("tokens", "lengths", "offsets", "positions"):
        assert getattr(again, name) == getattr(saved, name)


def test_two_entries_of_one_tensor_are_saved_both(tmp_path: Path) -> None:
    shared = torch.ones(1, 2, 3)
    saved = Cache({Address("resid_post", 0): shared, Address("resid_pre", 1): shared}, ((1, 2),), (2,), (0,))
    assert len(Cache.load(saved.save(tmp_path / "c.safetensors"))) == 2


def test_nothing_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="empty"):
        Cache({}).save(tmp_path / "c.safetensors")
    assert not list(tmp_path.iterdir())


def test_files_that_are_no_cache(cache: Cache, tmp_path: Path) -> None:
    good = cache.save(tmp_path / "good").read_bytes()
    tensors = {"resid_post.0": torch.ones(2)}
    save_file(tensors, tmp_path / "foreign")
    save_file(tensors, tmp_path / "text", metadata={"interp_cache": "{"})
    save_file(tensors, tmp_path / "other", metadata={"interp_cache": "[1]"})
    save_file(tensors, tmp_path / "short", metadata={"interp_cache": '{"tokens": []}'})
    meta = '{"tokens": [], "lengths": [], "offsets": [], "positions": null}'
    save_file({"Not An Address": torch.ones(2)}, tmp_path / "names", metadata={"interp_cache": meta})
    (tmp_path / "cut").write_bytes(good[:-5])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "noise").write_bytes(b"\xff" * 64)
    (tmp_path / "folder").mkdir()
    for name in ("foreign", "text", "other", "short", "names", "cut", "empty", "noise", "folder", "missing"):
        with pytest.raises(ModelUnavailable, match=name):
            Cache.load(tmp_path / name)


def test_another_device_and_copies(cache: Cache) -> None:
    assert cache.to("meta")["resid_post.0"].device.type == "meta"
    assert cache.to("meta").tokens == cache.tokens
    other = copy.deepcopy(cache)
    other["resid_post.0"].fill_(9)
    assert float(cache["resid_post.0"].max()) == 0
