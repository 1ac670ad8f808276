"""A harvest: what it holds, what it takes as texts, what it refuses, and that nothing is lost by a refusal."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

import interp_core
from interp_core import (
    Add,
    AddressError,
    Apply,
    Cache,
    CapabilityUnsupported,
    Harvest,
    InterpError,
    InterpModel,
    ModelUnavailable,
    RequestError,
    harvest,
    load_harvest,
    load_model,
)
from interp_core.cache_rows import own_rows
from interp_core.harvest_settings import read_plan
from interp_core.harvest_texts import Source
from interp_core.testing.tiny import write_family

torch.set_num_threads(1)
ROWS = [[5, 9, 11, 5, 77], [120, 42, 8], [200, 31, 64, 7], [9], [5, 9, 11, 5, 77], [31, 8], [64, 64, 64, 12]]
POINTS = ["resid_post.*", "z.1", "attn_scores.0", "value.1.kv_head-1"]
QUIET: dict[str, Any] = {"batch_size": 2, "shard_size": 4, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that puts a first token before a text."""
    folder = write_family("llama", tmp_path_factory.mktemp("harvest"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>"])
    tokenizer.train_from_iterator(["the capital of france"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[InterpModel]:
    with load_model(str(folder), "eager", dtype="float32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def held(model: InterpModel, tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    return model.harvest(ROWS, POINTS, tmp_path_factory.mktemp("held") / "h", **QUIET)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())} if folder.is_dir() else {}


def equal(one: Cache, other: Cache, i: int) -> None:
    """The one prompt of ``one`` is prompt ``i`` of ``other``, bit for bit."""
    for address in other:
        assert torch.equal(one[address][0], own_rows(other, address, i)), str(address)
    assert one.tokens == (other.tokens[i],)
    assert one.positions == (None if other.positions is None else (other.positions[i],))


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


# What it takes.

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


# Folders.


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
