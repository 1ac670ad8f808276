"""Engines as a user has them, in programs of their own that start new processes: a script, and the command line.

They are not marked ``vllm``, and so run beside the other engines of the tests, and on another core than those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_families import Loader

from interp_core.checks import difference
from interp_core.cli.main import app

TIGHT = 1e-5
SCRIPT = """
import json, sys
from pathlib import Path
import psutil
from interp_core import load_model

me, shared = psutil.Process(), Path("/dev/shm")
models = [load_model(folder, "vllm", dtype="float32", max_model_len=128) for folder in sys.argv[1:]]
assert not me.children(), "an engine was started before it was needed"
tokens = [list(model.generate([5, 9, 11], max_tokens=4, ignore_eos=True).token_ids) for model in models]
# But for Python's own tracker of shared memory, which stays as long as this process does.
children = [p for p in me.children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]
models[0].shutdown()
models[0].shutdown()
again = list(models[1].generate([5, 9, 11], max_tokens=4, ignore_eos=True).token_ids)
models[1].shutdown()
gone, alive = psutil.wait_procs(children, timeout=60)
left = [path.name for child in children for path in shared.glob(f"interp-{child.pid}-*")]
print(json.dumps({"tokens": tokens, "again": again, "children": len(children), "alive": [p.pid for p in alive],
                  "left": left}))
"""


@pytest.fixture(scope="module", autouse=True)
def another_core(quick_engines: None) -> Iterator[None]:
    """vLLM would bind each engine to the first core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(max(os.sched_getaffinity(0))))
        yield


def test_two_models_in_one_script_without_a_guard_and_nothing_is_left(
    loaded: Loader, vllm_folders: Callable[[str], str], tmp_path: Path
) -> None:
    script = tmp_path / "plain_script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_WORKER_MULTIPROC_METHOD"}
    families = ["llama", "gpt2"]
    done = subprocess.run(
        [sys.executable, str(script), *(vllm_folders(family) for family in families)],
        capture_output=True, text=True, timeout=400, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # Standard output is the script's alone: vLLM's log is elsewhere.
    found = json.loads(done.stdout)
    wanted = [loaded(f, "eager").generate([5, 9, 11], max_tokens=4, ignore_eos=True).token_ids for f in families]
    assert [tuple(t) for t in found["tokens"]] == wanted
    assert tuple(found["again"]) == wanted[1]
    assert found["children"] >= 4  # two for each engine
    assert found["alive"] == []
    assert found["left"] == []


def test_the_command_line_gives_eagers_answers(tmp_path: Path) -> None:
    from interp_eager.demo_model import prepare

    folder, prompt = prepare(), "The capital of France is"
    answers: dict[str, list[dict[str, object]]] = {}
    for backend in ("eager", "vllm"):
        common = ["--backend", backend, "--json"]
        lens = ["lens", folder, prompt, "--layers", "10,28,29", "--positions", "last", *common]
        out = ["--out", str(tmp_path / f"{backend}.safetensors")]
        capture = ["capture", folder, prompt, "resid_post.10", "z.3.head-4", *out, *common]
        start = _new_process if backend == "vllm" else _here
        answers[backend] = [start(lens), _here(capture), _here(["demo", *common])]
    (lens_e, _, demo_e), (lens_v, _, demo_v) = answers["eager"], answers["vllm"]
    for mine, theirs in zip(_cells(lens_v), _cells(lens_e), strict=True):
        assert mine["id"] == theirs["id"]
        assert abs(mine["probability"] - theirs["probability"]) < 1e-4
    assert _cells(lens_v)[-5]["token"] == " Paris"
    assert demo_v["steering"] == demo_e["steering"]
    assert demo_v["lens"]["best"] == demo_e["lens"]["best"]  # type: ignore[index]
    from safetensors.torch import load_file

    mine, theirs = (load_file(tmp_path / f"{backend}.safetensors") for backend in ("vllm", "eager"))
    for key in ("resid_post.10", "z.3.head-4"):
        assert difference(mine[key], theirs[key]) < TIGHT


def _here(arguments: list[str]) -> dict[str, object]:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output[-2000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _new_process(arguments: list[str]) -> dict[str, object]:
    command = [str(Path(sys.executable).parent / "interp"), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_WORKER_MULTIPROC_METHOD"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _cells(answer: dict[str, object]) -> list[dict[str, object]]:
    return [cell for layer in answer["top"] for position in layer for cell in position]  # type: ignore[attr-defined]
