"""Every code block of the README and of docs/ runs, as it stands, in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
SCRIPTS = Path(sys.executable).parent


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, match[2])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if match[1] == language
    ]


def run(command: list[str], folder: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, input=stdin, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def shell_lines() -> list[str]:
    return [line for _, block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.mark.real_model
@pytest.mark.parametrize("line", shell_lines())
def test_command(line: str, tmp_path: Path) -> None:
    command = shlex.split(line)
    if command[0].startswith("interp"):
        command[0] = str(SCRIPTS / command[0])
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() or list(tmp_path.iterdir())


def test_there_are_commands_and_a_failing_one_is_seen(tmp_path: Path) -> None:
    assert len(shell_lines()) >= 6
    assert run([str(SCRIPTS / "interp"), "points", "no-such-folder-or-model"], tmp_path).returncode == 1


@pytest.mark.real_model
@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value if len(value) < 30 else "code")
def test_python_block(page: str, code: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-"], tmp_path, stdin=code)
    assert done.returncode == 0, f"{page}:\n{done.stdout}{done.stderr}"
    if page == "README.md":
        assert "Paris" in done.stdout
        assert "no query and key norms" in done.stdout


def test_console_blocks_name_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = [line.split()[1] for _, block in blocks("console") for line in block.splitlines()]
    assert named == ["demo", "test"]
    assert set(named) <= targets


def test_points_page_is_current() -> None:
    done = run([sys.executable, str(ROOT / "tools" / "make_docs.py"), "--check"], ROOT)
    assert done.returncode == 0, "run: python tools/make_docs.py"


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
