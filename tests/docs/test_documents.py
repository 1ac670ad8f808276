"""Every code block of the README and of docs/ runs, as it stands, in a process of its own.

Most begin as forks of a process that has imported torch and transformers; the README's program, two of its commands,
and what starts an engine of vLLM begin as a user's do, from nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from zygote import Zygote

from interp_core.points import GENERAL_POINTS
from interp_core.vocabularies import LIBRARIES, VOCABULARIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
SCRIPTS = Path(sys.executable).parent
FROM_NOTHING = ("README.md", "docs/vllm.md", "interp plugins", "interp verify demo")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), match[2])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if match[1] == language
    ]


def run(command: list[str], folder: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # An engine's own processes as copies: that it starts new ones has tests of its own. And on another core than the
    # engines of other tests, which vLLM binds to the first.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    environment["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))
    return subprocess.run(
        command, input=stdin, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def shell_lines() -> list[tuple[str, str]]:
    return [(page, line) for page, block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.mark.real_model
@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_command(page: str, line: str, tmp_path: Path, zygote: Zygote) -> None:
    program, *arguments = shlex.split(line)
    if program == "interp" and line not in FROM_NOTHING:
        done = zygote.run("from interp_core.cli import main\nmain()", arguments, tmp_path)
    else:
        done = run([str(SCRIPTS / program) if program.startswith("interp") else program, *arguments], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() or list(tmp_path.iterdir())


def test_there_are_commands_and_a_failing_one_is_seen(tmp_path: Path) -> None:
    assert len(shell_lines()) >= 6
    assert {*FROM_NOTHING} < {part for pair in [*shell_lines(), *blocks("python")] for part in pair}
    assert run([str(SCRIPTS / "interp"), "points", "no-such-folder-or-model"], tmp_path).returncode == 1


@pytest.mark.real_model
@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda value: value if len(value) < 30 else "code")
def test_python_block(page: str, code: str, tmp_path: Path, zygote: Zygote) -> None:
    if page in FROM_NOTHING:
        done = run([sys.executable, "-"], tmp_path, stdin=code)
    else:
        done = zygote.run(code, folder=tmp_path)
    assert done.returncode == 0, f"{page}:\n{done.stdout}{done.stderr}"
    if page == "README.md":
        assert "Paris" in done.stdout
        assert "no query and key norms" in done.stdout


def test_console_blocks_name_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = [line.split()[1] for _, block in blocks("console") for line in block.splitlines()]
    assert named == ["demo", "test"]
    assert set(named) <= targets


def test_pages_made_from_tables_are_current() -> None:
    done = run([sys.executable, str(ROOT / "tools" / "make_docs.py"), "--check"], ROOT)
    assert done.returncode == 0, done.stderr


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return run([*command, "--site-dir", str(target)], target.parent)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("**/*.md"):
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    fetched = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//")
    for built in (tmp_path / "site").glob("**/*.html"):
        assert not fetched.search(built.read_text(encoding="utf-8")), f"{built} fetches from elsewhere"


def test_a_broken_link_or_a_page_outside_the_menu_fails_the_build(tmp_path: Path) -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for text, message in (("[gone](gone.md)", "gone.md"), ("[gone](index.md#gone)", "#gone"), ("fine", "extra.md")):
        folder = tmp_path / str(abs(hash(text)))
        shutil.copytree(ROOT / "docs", folder / "docs")
        page = folder / "docs" / ("extra.md" if text == "fine" else "index.md")
        page.write_text(f"# A page\n\n{text}\n", encoding="utf-8")
        (folder / "mkdocs.yml").write_text(config, encoding="utf-8")
        done = build(folder / "mkdocs.yml", folder / "site")
        assert done.returncode == 1
        assert message in done.stderr


@pytest.mark.parametrize("point", GENERAL_POINTS)
def test_the_migration_page_covers_every_point(point: str) -> None:
    lines = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{point}` |") and line.count(" | ") == len(LIBRARIES)]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")[1:]]
    reasons = "\n".join(lines[lines.index(row) :])
    for library, cell in zip(LIBRARIES, cells, strict=True):
        vocabulary = VOCABULARIES[library][0]
        if cell == "none":
            (reason, *_) = vocabulary.without(point)
            assert f"| `{point}` | {reason.why} | {reason.near} |" in reasons
        else:
            assert any(f"`{row.name.replace('{layer}', '3')}`" in cell for row in vocabulary.named(point))


def test_pages_name_no_machine_and_no_registry() -> None:
    # Put together here, or this file would be the one that names them.
    folders = [f"/{name}/" for name in ("home", "work", "opt", "simple")]
    banned = [*folders, "localhost", "pypi" + ".org", "files.python" + "hosted"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not [word for word in banned if word in text], page


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
