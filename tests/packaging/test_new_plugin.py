"""``interp new-plugin``: what it writes works as it is, is refused where it could not, and is whole or not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interp_core.cli import new_plugin
from interp_core.cli.main import app
from interp_core.cli.new_plugin import Kind, Names, write_project
from interp_core.errors import RequestError
from tests.packaging.environment import Environment, Wheels, build_project, private_imports

# One fault per kind, each in a line that its author would write wrongly, and what the suite says of it.
FAULTS = {
    "architecture": ("bindings.py", 'Read("mlp.valve")', 'Read("mlp.valve", "input")', "valve(mlp_in) is"),
    "backend": ("backend.py", "entering[layer]", "entering[max(layer - 1, 0)]", "a bare hook"),
}


@pytest.fixture(scope="module")
def here(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the core's wheel and that of the eager backend."""
    found = Environment(tmp_path_factory.mktemp("environment"))
    for name in ("interp-core", "interp-eager"):
        found.install(wheels[name])
    return found


@pytest.mark.parametrize("kind", list(Kind))
def test_its_tests_pass_as_generated_and_fail_with_a_fault(kind: str, here: Environment, tmp_path: Path) -> None:
    name, folder = f"interp-made-{kind}", tmp_path / "project"
    written = here.run("-m", "interp_core.cli", "new-plugin", name, "--kind", kind, "--into", str(folder), "--json")
    said = json.loads(written)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == said["files"]
    assert said["next"] == [f"pip install -e '{folder}[test]'", f"pytest {folder}"]
    assert "$" not in "".join((folder / file).read_text() for file in said["files"])
    here.install(build_project(folder, tmp_path / "dist"))
    try:
        rows = json.loads(here.run("-m", "interp_core.cli", "plugins", "--check", "--json"))["plugins"]
        assert [row["status"] for row in rows if row["distribution"] == name] == ["active"]
        done = here.test(str(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        # Negative control: they would notice.
        module, right, wrong, noticed = FAULTS[kind]
        installed = here.installed / said["package"] / said["package"] / module
        text = installed.read_text()
        assert text.count(right) == 1
        installed.write_text(text.replace(right, wrong))
        done = here.test(str(folder), "-k", "every_point_is_proven")
        assert done.returncode == 1, done.stdout + done.stderr
        assert noticed in done.stdout
    finally:
        here.uninstall(said["package"])


@pytest.mark.parametrize("kind", list(Kind))
def test_it_is_lint_clean_and_uses_public_names_only(kind: str, tmp_path: Path) -> None:
    write_project(Names.of("interp-made"), kind, tmp_path / "project")
    assert private_imports(tmp_path) == []
    for command in (["check", "--select", "B,E,F,I,RUF,SIM,UP,W"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tmp_path / "project",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["new-plugin", *arguments])


def test_it_says_what_it_made(tmp_path: Path) -> None:
    folder = tmp_path / "below" / "this"
    done = invoke("Interp_Some.Thing", "--kind", "backend", "--into", str(folder))
    assert done.exit_code == 0, done.output
    for said in ("src/interp_some_thing/plugin.py", "pip install -e ", f"pytest {folder}"):
        assert said in done.output
    project = (folder / "pyproject.toml").read_text()
    assert 'name = "interp-some-thing"' in project
    assert '"interp-core>=0.' in project


@pytest.mark.parametrize("name", ["-foo", "foo bar", "föö", "", "3d", "interp-3d", "interp-class", "a/b", "interp-"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    done = invoke("--kind", "backend", "--into", str(tmp_path / "made"), "--", name)
    assert isinstance(done.exception, RequestError), done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("interp-eager", "interp-eager"),  # the distribution
        ("eager", "interp-eager"),  # the plugin
        ("interp-vllm-static", "interp-vllm"),  # a backend of a plugin
        ("interp-gemma3n", "interp-deepseek-v4"),  # an architecture of one
        ("json", "imports"),
        ("interp-core", "interp_core"),
        ("interp-auto", "load_model"),
    ],
)
def test_a_name_that_is_taken_is_refused(name: str, owner: str, tmp_path: Path) -> None:
    done = invoke(name, "--kind", "architecture", "--into", str(tmp_path / "made"))
    assert isinstance(done.exception, RequestError), done.output
    assert owner in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    for folder in (full, file):
        done = invoke("interp-made", "--kind", "backend", "--into", str(folder))
        assert isinstance(done.exception, RequestError)
        assert str(folder) in str(done.exception)
    assert [p.name for p in full.iterdir()] == ["mine.txt"]
    empty.mkdir()
    assert invoke("interp-made", "--kind", "backend", "--into", str(empty)).exit_code == 0
    assert (empty / "pyproject.toml").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = new_plugin._write, []

    def breaks(*arguments: Any) -> Path:
        calls.append(arguments)
        if len(calls) == 4:
            raise OSError("no space left")
        return whole(*arguments)

    monkeypatch.setattr(new_plugin, "_write", breaks)
    with pytest.raises(OSError, match="no space"):
        write_project(Names.of("interp-made"), Kind.backend, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []
