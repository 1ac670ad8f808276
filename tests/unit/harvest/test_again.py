"""A harvest into a folder that is not empty: what is continued, what is left alone, and what is spoiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

import interp_core
from interp_core import (
    Add,
    Apply,
    Harvest,
    InterpModel,
    ModelUnavailable,
    RequestError,
    harvest,
    load_harvest,
    load_model,
)
from interp_core.harvest_texts import Source
from tests.unit.harvest.settings import POINTS, QUIET, ROWS, files


def test_a_folder_of_something_else_is_left_alone(model: InterpModel, held: Harvest, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.json").write_text('{"weight_map": {}}')
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "index.json").write_text("{")
    (tmp_path / "shard").mkdir()
    shutil.copy(held.path / "shard-000000.safetensors", tmp_path / "shard")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for name, words in (
        ("notes", "something else .*a.txt"),
        ("file", "something else"),
        ("other", "no index of a harvest"),
        ("half", "cannot be read as the index"),
        ("shard", "something else .*shard-000000"),
    ):
        with pytest.raises((RequestError, ModelUnavailable), match=words):
            model.harvest(ROWS, POINTS, tmp_path / name, **QUIET)
        if name != "file":
            with pytest.raises(ModelUnavailable):
                load_harvest(tmp_path / name)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_an_empty_folder_and_one_below_others_are_fine(model: InterpModel, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert len(model.harvest(ROWS, POINTS, tmp_path / "empty", **QUIET)) == 7
    assert len(model.harvest(ROWS, POINTS, str(tmp_path / "a" / "b"), **QUIET)) == 7
    (tmp_path / "blocked").write_text("")
    with pytest.raises(RequestError):
        model.harvest(ROWS, POINTS, tmp_path / "blocked" / "below", **QUIET)


def test_two_runs_do_not_write_to_one_folder(model: InterpModel, tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    with FileLock(tmp_path / "h" / ".lock"), pytest.raises(RequestError, match="another run is harvesting"):
        model.harvest(ROWS, POINTS, tmp_path / "h", **QUIET)
    assert len(model.harvest(ROWS, POINTS, tmp_path / "h", **QUIET)) == 7


# Continuing.


def test_a_harvest_that_is_complete_runs_one_batch_and_writes_nothing(
    model: InterpModel, held: Harvest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, batches = files(held.path), []
    run = model.session.run
    monkeypatch.setattr(type(model.session), "run", lambda _, requests: batches.append(len(requests)) or run(requests))
    again = model.harvest(iter(ROWS), POINTS, held.path, **QUIET)
    assert batches == [2], "the first batch, to see that it is the same model"
    assert len(again) == 7
    assert files(held.path) == before


def test_what_is_continued_runs_only_what_is_missing(
    model: InterpModel, held: Harvest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    run = model.session.run

    def failing(_: Any, requests: Any) -> Any:
        batches.append(len(requests))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return run(requests)

    with monkeypatch.context() as patched:
        patched.setattr(type(model.session), "run", failing)
        with pytest.raises(KeyboardInterrupt):
            model.harvest(ROWS, POINTS, tmp_path / "h", **QUIET)
        assert sorted(p.name for p in (tmp_path / "h").iterdir()) == [
            ".lock",
            "index.json",
            "shard-000000.safetensors",
        ]
        del batches[:]
        batches += [0, 0, 0]  # past the failure
        model.harvest(ROWS, POINTS, tmp_path / "h", **QUIET)
    assert batches[3:] == [2, 2, 1], "the first again, then the two of the second shard"
    assert files(tmp_path / "h") == files(held.path)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": ({"batch_size": 4}, "batch_size 2, now 4"),
    "shard size": ({"shard_size": 2}, "shard_size 4, now 2"),
    "points": ({"points": POINTS[:2]}, "points .*, now "),
    "positions": ({"positions": "last"}, 'positions null, now "last"'),
    "max_length": ({"max_length": 9}, "max_length null, now 9"),
    "dtype": ({"dtype": "float16"}, 'dtype null, now "float16"'),
    "steering": ({"steering": Add("resid_post.0", torch.ones(96))}, r"steering \[\], now"),
    "a text": ({"texts": [*ROWS[:5], [32, 8], ROWS[6]]}, "other texts: texts 4 to 6 .*shard-000001"),
    "an order": ({"texts": [ROWS[1], ROWS[0], *ROWS[2:]]}, "other texts: texts 0 to 3"),
    "fewer": ({"texts": ROWS[:4]}, "holds 7 texts already; this input has 4"),
    "one less": ({"texts": ROWS[:6]}, "other texts: texts 4 to 6"),
    "more": ({"texts": [*ROWS, [5]]}, "other texts: texts 4 to 7"),
    "one to a row": ({"texts": [ROWS[0][:2], ROWS[0][2:], *ROWS[1:]]}, "other texts"),
    "not to be continued": ({"resume": False}, "holds a harvest of 7 texts, and resume=False"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_another_harvest_is_refused_and_says_what_differs(
    model: InterpModel, held: Harvest, tmp_path: Path, case: str
) -> None:
    shutil.copytree(held.path, tmp_path / "h")
    before = files(tmp_path / "h")
    changes, words = CHANGES[case]
    given = {"texts": ROWS, "points": POINTS, **QUIET, **changes}
    with pytest.raises(RequestError, match=words):
        harvest(model, given.pop("texts"), given.pop("points"), tmp_path / "h", **given)
    assert files(tmp_path / "h") == before


def test_more_texts_than_a_complete_harvest_has(model: InterpModel, tmp_path: Path) -> None:
    model.harvest(ROWS[:4], POINTS, tmp_path / "h", **QUIET)
    with pytest.raises(RequestError, match="complete harvest of 4 texts; this has more"):
        model.harvest(ROWS, POINTS, tmp_path / "h", **QUIET)
    assert len(load_harvest(tmp_path / "h")) == 4


def test_vectors_and_versions_are_part_of_the_settings(
    model: InterpModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(vector: torch.Tensor, scale: float = 1.0) -> Harvest:
        add = Add("resid_post.0", vector, scale=scale)
        return model.harvest(ROWS, ["resid_post.1"], tmp_path / "h", steering=add, **QUIET)

    run(torch.ones(96))
    run(torch.ones(96))
    for vector, scale in ((torch.ones(96) + 1e-3, 1.0), (torch.ones(96), 1.5)):
        with pytest.raises(RequestError, match="steering"):
            run(vector, scale)
    monkeypatch.setattr("interp_core.harvest_settings.__version__", "9.9")
    with pytest.raises(RequestError, match=r'versions\.interp-core "0\.1\.0", now "9\.9"'):
        run(torch.ones(96))


def test_other_weights_or_another_callable_are_seen(model: InterpModel, folder: Path, tmp_path: Path) -> None:
    twice = Apply("resid_post.0", lambda x: 2 * x)
    model.harvest(ROWS, ["resid_post.1"], tmp_path / "a", steering=twice, **QUIET)
    model.harvest(ROWS, ["resid_post.1"], tmp_path / "a", steering=Apply("resid_post.0", lambda x: x + x), **QUIET)
    with pytest.raises(RequestError, match=r"resid_post\.1 has other values"):
        model.harvest(ROWS, ["resid_post.1"], tmp_path / "a", steering=Apply("resid_post.0", lambda x: 3 * x), **QUIET)
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    with load_model(str(copy), "eager", dtype="float32") as first:
        first.harvest(ROWS, POINTS, tmp_path / "b", **QUIET)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with (
        load_model(str(copy), "eager", dtype="float32") as second,
        pytest.raises(RequestError, match=r"resid_post\.1 has other values"),
    ):
        second.harvest(ROWS, POINTS, tmp_path / "b", **QUIET)


# Spoiled files.


def spoil_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        record = json.loads((folder / "index.json").read_text())
        change(record)
        (folder / "index.json").write_text(json.dumps(record))

    return spoil


def cut(folder: Path) -> None:
    shard = folder / "shard-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])


def noise(folder: Path) -> None:
    shard = folder / "shard-000001.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)


def of_another(folder: Path) -> None:
    shard = folder / "shard-000001.safetensors"
    save_file(load_file(shard), shard, metadata={"interp_harvest": "0" * 64})


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (lambda f: (f / "shard-000001.safetensors").unlink(), "cannot be read"),
    "a cut shard": (cut, "is spoiled"),
    "noise": (noise, "cannot be read"),
    "another's shard": (of_another, "not a shard of this harvest"),
    "settings": (spoil_index(lambda r: r["settings"].update(batch_size=3)), "not those of its fingerprint"),
    "a shard too few": (spoil_index(lambda r: r["shards"].pop(0)), "do not follow"),
    "fields": (spoil_index(lambda r: r["shards"][0].pop("rows")), "spoiled index"),
    "no shards": (spoil_index(lambda r: r.pop("shards")), "spoiled index"),
    "another format": (spoil_index(lambda r: r.update(format="interp-harvest 2")), "'interp-harvest 2'"),
    "a list": (lambda f: (f / "index.json").write_text("[]") and None, "no index"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_harvest_is_one_error(model: InterpModel, held: Harvest, tmp_path: Path, case: str) -> None:
    shutil.copytree(held.path, tmp_path / "h")
    assert [c.tokens[0] for c in load_harvest(tmp_path / "h")] == list(map(tuple, ROWS))
    spoil, words = SPOILED[case]
    spoil(tmp_path / "h")
    before = files(tmp_path / "h")
    with pytest.raises(ModelUnavailable, match=words):
        list(load_harvest(tmp_path / "h"))
    with pytest.raises(ModelUnavailable, match=words):
        model.harvest(ROWS, POINTS, tmp_path / "h", **QUIET)
    assert files(tmp_path / "h") == before


# The surface.


def test_the_bar_goes_to_standard_error(model: InterpModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.harvest(ROWS, ["resid_post.1"], tmp_path / "a", batch_size=2)
    shown = capsys.readouterr()
    assert "7/7" in shown.err
    assert not shown.out
    model.harvest(ROWS, ["resid_post.1"], tmp_path / "b", batch_size=2, progress=False)
    assert not capsys.readouterr().err


def test_the_name_is_the_function_whatever_was_imported_first() -> None:
    assert callable(interp_core.harvest)
    assert interp_core.load_harvest is load_harvest
    assert Source.of(ROWS).count == 7
