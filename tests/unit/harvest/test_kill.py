"""What a kill -9 in the middle of a harvest leaves, and what continuing makes of it; and how much memory it takes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interp_core import load_harvest
from interp_core.testing.tiny import write_family

RUNS = Path(__file__).with_name("runs.py")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("llama", tmp_path_factory.mktemp("model"))


def runs(what: str, model: Path, folder: Path, *numbers: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(RUNS), what, str(model), str(folder), *map(str, numbers)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def test_a_killed_harvest_of_2000_texts_continues_to_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    found = runs("kills", llama, tmp_path, 2000, seed)
    assert found["codes"] == [-9, -9, -9, -9, 0], f"seed {seed}"
    assert all(0 < n < 40 for n in found["left"]), f"each was killed in the middle; seed {seed}"
    assert found["left"] == sorted(found["left"])
    assert len(found["whole"]) == 42  # shards, index and lock
    assert found["broken"] == found["whole"], f"seed {seed}"
    # The comparison sees one text that is another.
    differing = {name for name in found["other"] if found["other"][name] != found["whole"][name]}
    assert differing == {"index.json", "shard-000000.safetensors"}
    assert "shard-000001.safetensors" in found["other"]
    assert len(load_harvest(tmp_path / "broken")) == 2000


def test_a_kill_before_or_after_any_rename_loses_nothing(llama: Path, tmp_path: Path) -> None:
    found = runs("windows", llama, tmp_path)
    finished = {"shard-000000.safetensors", "shard-000001.safetensors", "shard-000002.safetensors"}
    # Renames: the first index, three times a shard and its index, and the index that says it is complete.
    assert {name: run["code"] for name, run in found["runs"].items()} == dict.fromkeys(found["runs"], -9)
    assert len(found["runs"]) == 16
    for name, run in found["runs"].items():
        assert run["files"] == found["whole"], name
    partial = {name for name, run in found["runs"].items() if any(n.endswith(".partial") for n in run["left"])}
    assert partial == {f"{call}False" for call in range(8)}, "the kills were where they should be"
    assert not finished & set(found["runs"]["0True"]["left"])
    assert finished <= set(found["runs"]["5True"]["left"])


def test_memory_does_not_grow_with_the_texts(llama: Path, tmp_path: Path) -> None:
    found = runs("memory", llama, tmp_path)
    (few, _), (many, captured), (one_shard, _) = found["few"], found["many"], found["one shard"]
    assert captured > 90 * 2**20
    assert many - few < captured / 8
    # The measurement sees a harvest that does hold everything.
    assert one_shard - few > captured / 2
