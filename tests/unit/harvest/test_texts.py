"""A harvest: what it takes as texts and settings, and what it refuses before any work."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interp_core import (
    Add,
    AddressError,
    CapabilityUnsupported,
    InterpError,
    InterpModel,
    ModelUnavailable,
    RequestError,
    harvest,
    load_harvest,
    load_model,
)
from interp_core.testing.tiny import write_family
from tests.unit.harvest.settings import POINTS, QUIET, ROWS

TEXTS = ["the capital", "of", "the capital", "france the"]


class Records:
    """As much of a data set as a harvest looks at."""

    column_names = ("text", "input_ids")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            self.read += 1
            yield row


def of_file(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content, encoding="utf-8")
        return folder / name

    return write


SOURCES: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: TEXTS,
    "tuple": lambda _: tuple(TEXTS),
    "generator": lambda _: (text for text in TEXTS),
    "records": lambda _: Records([{"text": text, "other": 1} for text in TEXTS]),
    "file": of_file("t.txt", "\n".join(TEXTS)),
    "file with an end": of_file("t.txt", "\n".join(TEXTS) + "\n"),
    "file of Windows": of_file("t.txt", "\r\n".join(TEXTS)),
    "open file": lambda _: io.StringIO("\n".join(TEXTS)),
    "jsonl of texts": of_file("t.jsonl", "\n".join(map(json.dumps, TEXTS))),
    "jsonl of records": of_file("t.jsonl", "\n".join(json.dumps({"text": text}) for text in TEXTS)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_texts_from_everywhere(model: InterpModel, tmp_path: Path, source: str) -> None:
    found = model.harvest(SOURCES[source](tmp_path), ["resid_post.1"], tmp_path / "h", **QUIET)
    rows = [model.to_tokens(text)[0].tolist() for text in TEXTS]
    assert [list(found.tokens(i)) for i in range(4)] == rows
    assert all(row[0] == 0 for row in rows)
    bare = model.harvest(TEXTS, ["resid_post.1"], tmp_path / "b", add_special_tokens=False, **QUIET)
    assert [list(bare.tokens(i)) for i in range(4)] == [row[1:] for row in rows]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:2],
        [tuple(row) for row in ROWS[:2]],
        (row for row in ROWS[:2]),
        [torch.tensor(row) for row in ROWS[:2]],
        [np.array(row) for row in ROWS[:2]],
        [torch.tensor([row]) for row in ROWS[:2]],
        Records([{"text": row} for row in ROWS[:2]]),
    ],
    ids=["lists", "tuples", "generator", "tensors", "arrays", "as to_tokens", "records"],
)
def test_token_ids_need_no_tokenizer(model: InterpModel, tmp_path: Path, rows: Any) -> None:
    found = model.harvest(rows, ["resid_post.1"], tmp_path / "h", **QUIET)
    assert [list(found.tokens(i)) for i in range(2)] == ROWS[:2]


def test_a_tensor_of_rows_and_a_column(model: InterpModel, tmp_path: Path) -> None:
    found = model.harvest(torch.tensor([[5, 9], [7, 3]]), ["resid_post.1"], tmp_path / "h", **QUIET)
    assert [found.tokens(i) for i in range(2)] == [(5, 9), (7, 3)]
    records = Records([{"input_ids": row} for row in ROWS[:2]])
    named = model.harvest(records, ["resid_post.1"], tmp_path / "i", column="input_ids", **QUIET)
    assert named.tokens(1) == tuple(ROWS[1])


def test_texts_are_cut_only_where_it_is_asked_and_then_counted(model: InterpModel, tmp_path: Path) -> None:
    found = model.harvest(ROWS, ["resid_post.1"], tmp_path / "h", max_length=3, **QUIET)
    assert [found.tokens(i) for i in range(7)] == [tuple(row[:3]) for row in ROWS]
    assert found.truncated == found.index.total("truncated") == 4
    assert json.loads((found.path / "index.json").read_text())["truncated"] == 4
    long = [*ROWS, [5] * 65]
    with pytest.raises(
        RequestError, match=r"text 7 .* 65 tokens are more than this model takes \(64\); max_length cuts"
    ):
        model.harvest(long, ["resid_post.1"], tmp_path / "i", **QUIET)
    assert not (tmp_path / "i").exists()
    assert model.harvest(long, ["resid_post.1"], tmp_path / "i", max_length=64, **QUIET).truncated == 1


# What it refuses.

BAD_TEXTS: dict[str, tuple[Any, str]] = {
    "one text": ("the capital", r"\['the capital'\], or Path"),
    "bytes": (b"the", "not one"),
    "a mapping": ({"train": ROWS, "test": ROWS}, "train, test: name one"),
    "a set": ({"a", "b"}, "no order"),
    "a number": (5, "not int"),
    "nothing": (None, "not NoneType"),
    "no texts": ([], "no text"),
    "no texts to come": (iter(()), "no text"),
    "no such file": (Path("no-such-file"), "not a file"),
    "one row": ([5, 9, 11], "text 0 is neither text nor a list"),
    "an empty text": ([*TEXTS, ""], r"text 4 .* is empty"),
    "an empty row": ([*ROWS, []], "text 7 .* empty"),
    "an empty text to come": (iter([""]), "text 0 .* is empty"),
    "None": ([*ROWS, None], "text 7 is neither"),
    "floats": ([*ROWS, [1.5]], "text 7 .* integers"),
    "booleans": ([*ROWS, [True]], "text 7 .* integers"),
    "ids of another vocabulary": ([*ROWS, [300]], "text 7 .* outside the vocabulary"),
    "negative ids": ([*ROWS, [-1]], "text 7 .* outside the vocabulary"),
    "rows of rows": ([*ROWS, [[1], [2]]], "text 7 .* several rows"),
    "text among ids": ([*ROWS, ["a"]], "text 7 .* not text"),
    "another column": (Records([{"texts": "a"}]), r"text 0 has no 'text', only texts.*column='texts'"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_bad_texts_are_one_error_before_any_work(folder: Path, tmp_path: Path, case: str) -> None:
    given, words = BAD_TEXTS[case]
    cold = load_model(str(folder), "eager", dtype="float32")
    with pytest.raises(RequestError, match=words):
        cold.harvest(given, ["resid_post.1"], tmp_path / "h", **QUIET)
    assert not (tmp_path / "h").exists()
    assert not cold.session.warm


@pytest.mark.parametrize(
    ("name", "content"), [("t.jsonl", '"a"\n{'), ("t.txt", "a\n\nb")], ids=["spoiled JSON", "an empty line"]
)
def test_bad_files(model: InterpModel, tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(RequestError, match=r"line 2 is not JSON|text 1 .* is empty"):
        model.harvest(of_file(name, content)(tmp_path), ["resid_post.1"], tmp_path / "h", **QUIET)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read"):
        model.harvest(tmp_path / "binary", ["resid_post.1"], tmp_path / "h", **QUIET)
    assert not (tmp_path / "h").exists()


BAD_SETTINGS: list[tuple[dict[str, Any], type[InterpError], str]] = [
    ({"points": []}, RequestError, "points is empty"),
    ({"points": ["resid_pots.1"]}, AddressError, "resid_post"),
    ({"points": ["q_norm_in.1"]}, CapabilityUnsupported, "Instead"),
    ({"batch_size": 0}, RequestError, "batch_size"),
    ({"batch_size": True}, RequestError, "batch_size"),
    ({"shard_size": 0}, RequestError, "shard_size"),
    ({"max_length": 0}, RequestError, "max_length"),
    ({"max_length": 65}, RequestError, "more than this model takes"),
    ({"positions": "first"}, RequestError, "positions"),
    ({"positions": [3]}, RequestError, "text 1 .* position 3 is not there"),
    ({"dtype": "int8"}, RequestError, "dtype"),
    ({"steering": "add"}, RequestError, "operations"),
    ({"steering": Add("resid_post.0", torch.ones(3))}, RequestError, "shape"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_bad_settings(
    model: InterpModel, tmp_path: Path, changes: dict[str, Any], kind: type[InterpError], words: str
) -> None:
    given = {"points": ["resid_post.1"], **QUIET, **changes}
    with pytest.raises(kind, match=words):
        harvest(model, ROWS, given.pop("points"), tmp_path / "h", **given)
    assert not (tmp_path / "h").exists()
    with pytest.raises(TypeError, match="batch_sise"):
        harvest(model, ROWS, ["resid_post.1"], tmp_path / "h", batch_sise=2)  # type: ignore[call-arg]


def test_texts_without_a_tokenizer(tmp_path: Path) -> None:
    with load_model(str(write_family("qwen3", tmp_path)), "eager", dtype="float32") as bare:
        with pytest.raises(ModelUnavailable, match="Token ids still work"):
            bare.harvest(TEXTS, ["resid_post.1"], tmp_path / "h", **QUIET)
        assert not (tmp_path / "h").exists()
        assert len(bare.harvest(ROWS, ["resid_post.1"], tmp_path / "h", **QUIET)) == 7


def test_a_bad_text_late_in_a_stream_leaves_what_was_finished(model: InterpModel, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"text 6 .* empty"):
        model.harvest(iter([*ROWS[:6], []]), POINTS, tmp_path / "h", **QUIET)
    part = load_harvest(tmp_path / "h")
    assert (len(part), part.complete) == (4, False)
    assert "not complete" in repr(part)
    whole = model.harvest(iter(ROWS), POINTS, tmp_path / "h", **QUIET)
    assert (len(whole), whole.complete) == (7, True)
