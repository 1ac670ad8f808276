"""Run by tests of harvests, in a process of its own: children that harvest, are killed, and are measured.

The parent imports and loads once and runs no forward; each child is forked from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from interp_core import InterpModel, harvest, load_model

POINTS = ["resid_post.*", "z.1", "mlp_act.0.neuron-3"]
MATRICES = [*POINTS, "attn_probs.0"]
WIDE = ["resid_post.*", "resid_pre.*", "z.*", "mlp_act.*"]
SETTINGS: dict[str, Any] = {"batch_size": 25, "shard_size": 50, "progress": False}


def texts(count: int, longest: int, seed: int = 0) -> Iterator[list[int]]:
    """Rows of ids, one at a time."""
    generator = random.Random(seed)
    for _ in range(count):
        yield [generator.randrange(2, 300) for _ in range(generator.randint(1, longest))]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def forked(work: Callable[[], object]) -> int:
    """A child that does ``work``; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def finished(child: int) -> int:
    """Wait for a child; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shards(folder: Path) -> int:
    """Finished shards. The index can be read at any moment, or is not there yet."""
    index = folder / "index.json"
    return len(json.loads(index.read_text(encoding="utf-8"))["shards"]) if index.is_file() else 0


def killed_at(child: int, folder: Path, target: int, delay: float) -> int:
    """Kill a child a moment after it has written ``target`` shards; its exit code."""
    while shards(folder) < target:
        if os.waitpid(child, os.WNOHANG)[0]:
            return 0
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return finished(child)


def kills(model: InterpModel, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """One run that nothing ends, one killed at random moments and continued, and the first shards of other texts."""
    rows, moments = list(texts(count, 12)), random.Random(seed)
    whole, broken, other = (folder / name for name in ("whole", "broken", "other"))
    assert finished(forked(lambda: harvest(model, rows, POINTS, whole, **SETTINGS))) == 0
    whole_shards = count // SETTINGS["shard_size"]
    targets = sorted(moments.sample(range(1, whole_shards - 10), 4))
    codes, left = [], []
    for target in targets:
        child = forked(lambda: harvest(model, iter(rows), POINTS, broken, **SETTINGS))
        codes.append(killed_at(child, broken, target, moments.uniform(0, 0.02)))
        left.append(shards(broken))
    codes.append(finished(forked(lambda: harvest(model, iter(rows), POINTS, broken, **SETTINGS))))
    changed = [[7], *rows[1 : 2 * SETTINGS["shard_size"]]]
    assert finished(forked(lambda: harvest(model, changed, POINTS, other, **SETTINGS))) == 0
    return {"codes": codes, "left": left, "whole": digests(whole), "broken": digests(broken), "other": digests(other)}


def dying(call: int, after: bool) -> None:
    """Make this process kill itself before or after its rename number ``call``."""
    rename, calls = Path.replace, iter(range(1000))

    def replace(self: Path, target: Any) -> Path:
        last = next(calls) == call
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = rename(self, target)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Path.replace = replace  # type: ignore[method-assign]


def windows(model: InterpModel, folder: Path) -> dict[str, Any]:
    """Kills at the worst moments: before and after each rename of the first two shards and of their index."""
    rows = list(texts(24, 12))
    settings = {**SETTINGS, "shard_size": 8, "batch_size": 5}
    assert finished(forked(lambda: harvest(model, rows, MATRICES, folder / "whole", **settings))) == 0
    found: dict[str, Any] = {"whole": digests(folder / "whole"), "runs": {}}
    for call in range(8):
        for after in (False, True):
            target = folder / f"{call}{after}"

            def run(call: int = call, after: bool = after, target: Path = target) -> None:
                dying(call, after)
                harvest(model, rows, MATRICES, target, **settings)

            code = finished(forked(run))
            left = sorted(p.name for p in target.iterdir())
            assert finished(forked(lambda target=target: harvest(model, rows, MATRICES, target, **settings))) == 0
            found["runs"][target.name] = {"code": code, "left": left, "files": digests(target)}
    return found


def peak() -> int:
    """Most memory that this process has used, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def memory(model: InterpModel, folder: Path) -> dict[str, Any]:
    """Peak memory of harvests of few and of ten times as many texts, and of many in one shard."""

    def run(count: int, shard_size: int) -> tuple[int, int]:
        target = folder / f"{count}-{shard_size}"
        read, write = os.pipe()

        def work() -> None:
            settings = {**SETTINGS, "shard_size": shard_size}
            found = harvest(model, texts(count, 60), WIDE, target, **settings)
            os.write(write, json.dumps([peak(), found.index.total("bytes")]).encode())

        assert finished(forked(work)) == 0
        os.close(write)
        with os.fdopen(read) as pipe:
            used, held = json.load(pipe)
        return used, held

    return {"few": run(100, 50), "many": run(1000, 50), "one shard": run(1000, 1000)}


def main() -> None:
    """``runs.py WHAT MODEL FOLDER [NUMBER...]``: one JSON record on standard output."""
    torch.set_num_threads(1)
    what, folder, numbers = sys.argv[1], Path(sys.argv[3]), list(map(int, sys.argv[4:]))
    with load_model(sys.argv[2], "eager", dtype="float32") as model:
        model.warmup()
        record = {"kills": kills, "windows": windows, "memory": memory}[what](model, folder, *numbers)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
