"""Make real wheels out of a few files, and install them into a folder, offline."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["build_wheel", "install_wheels"]

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = [{requires}]

[project.entry-points."interp.plugins"]
{entries}

[tool.hatch.build.targets.wheel]
only-include = [{included}]
"""


def build_wheel(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    *,
    entries: Mapping[str, str],
    version: str = "1.0",
    requires: Sequence[str] = (),
) -> Path:
    """Write the source of a distribution into ``folder`` and build its wheel with hatchling.

    Args:
        folder: where the source goes, and the wheel under ``dist``.
        name: the distribution's name.
        files: relative path to text, such as ``{"my_plugin.py": "..."}``.
        entries: entry points of the group ``interp.plugins``, name to value.
        version: the distribution's version.
        requires: its requirements.
    """
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    tops = sorted({path.partition("/")[0] for path in files})
    project = _PROJECT.format(
        name=name,
        version=version,
        requires=", ".join(f'"{line}"' for line in requires),
        entries="\n".join(f'"{key}" = "{value}"' for key, value in entries.items()),
        included=", ".join(f'"{top}"' for top in tops),
    )
    (folder / "pyproject.toml").write_text(project)
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist", cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install_wheels(wheels: Iterable[Path], target: Path) -> None:
    """Install wheels into the folder ``target``, as pip installs any; nothing is fetched."""
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    _run(sys.executable, "-m", "pip", "install", *offline, "--target", str(target), *map(str, wheels))


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
