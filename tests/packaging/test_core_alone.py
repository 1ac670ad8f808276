"""The core in an environment of its own: no backend, no torch, no transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of scripts of a fresh environment with the core's wheel and what it requires."""
    folder = tmp_path_factory.mktemp("core-alone")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    venv.create(folder / "venv", with_pip=True)
    found = folder / "venv" / "bin"
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run([str(found / "pip"), "install", "--quiet", str(wheel)], check=True, capture_output=True)
    return found


def run(scripts: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(scripts / command[0]), *command[1:]], capture_output=True, text=True, timeout=120, check=False
    )


def test_it_brings_no_engine(scripts: Path) -> None:
    code = "from importlib.util import find_spec as f; print([n for n in ('torch', 'transformers', 'vllm') if f(n)])"
    assert run(scripts, "python", "-c", code).stdout.strip() == "[]"


def test_plugins_and_capabilities_work(scripts: Path) -> None:
    done = run(scripts, "interp", "plugins")
    assert done.returncode == 0, done.stderr
    assert "pip install interp-eager" in done.stdout
    assert json.loads(run(scripts, "interp", "plugins", "--json").stdout)["plugins"] == []
    assert run(scripts, "interp", "plugins", "--check").returncode == 0
    assert len(json.loads(run(scripts, "interp", "capabilities", "--json").stdout)) >= 6


@pytest.mark.parametrize("command", [["describe", "some-model"], ["points", "demo"], ["lens", "some-model", "text"]])
def test_a_question_about_a_model_says_what_to_install(scripts: Path, command: list[str]) -> None:
    done = run(scripts, "interp", *command)
    assert done.returncode == 1
    assert "pip install" in done.stderr
    assert "interp-eager" in done.stderr
    assert "Traceback" not in done.stderr
