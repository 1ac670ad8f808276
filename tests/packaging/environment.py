"""An environment of installed wheels beside the third-party packages of this one, without anything of this checkout."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.packaging.wheels import install_wheels

__all__ = ["ROOT", "Environment", "Wheels", "build_project", "private_imports"]

ROOT = Path(__file__).resolve().parents[2]


def build_project(source: Path, out: Path) -> Path:
    """Build the wheel of a project's folder into ``out``."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def private_imports(folder: Path) -> list[str]:
    """What the Python files below a folder import of the core that its modules' ``__all__`` do not name."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "interp_core":
                public = importlib.import_module(node.module or "").__all__
                found += [
                    f"{file.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in public
                ]
    return found


class Wheels:
    """Wheels of this checkout by distribution, each built when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        out = self.folder / name
        return next(out.glob("*.whl")) if out.is_dir() else build_project(self.source(name), out)

    @staticmethod
    def source(name: str) -> Path:
        """The folder of a distribution."""
        package = name.replace("-", "_")
        places = (ROOT / "plugins" / package, ROOT / "examples" / package)
        return ROOT if name == "interp-core" else next(place for place in places if place.is_dir())


class Environment:
    """Folders of installed wheels beside the third-party packages of this environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.others = folder / "others"
        self.others.mkdir()
        for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
            # Everything but this project, whose packages come from wheels here or not at all.
            if not entry.name.lower().startswith(("interp", "_interp", "__editable__")) and entry.suffix != ".pth":
                (self.others / entry.name).symlink_to(entry)
        self.installed = folder / "installed"

    def install(self, wheel: Path) -> None:
        """Install one wheel into a folder of its own."""
        install_wheels([wheel], self.installed / wheel.name.partition("-")[0])

    def uninstall(self, distribution: str) -> None:
        """Remove it again."""
        shutil.rmtree(self.installed / distribution.replace("-", "_"))

    def run(self, *command: str) -> str:
        """Standard output of a Python process in this environment, which has to succeed."""
        done = self.attempt(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def attempt(self, *command: str) -> subprocess.CompletedProcess[str]:
        """The same, whether or not it succeeds."""
        paths = [*sorted(str(p) for p in self.installed.iterdir()), str(self.others)]
        # The demonstration model is made once per machine, wherever that was said to be.
        kept = {k: v for k, v in os.environ.items() if k == "INTERP_CACHE" or not k.startswith(("INTERP_", "PYTHON"))}
        environment = {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        base = Path(sys.base_prefix) / "bin" / Path(sys.executable).name
        return subprocess.run(
            [str(base), *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def test(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """pytest in this environment."""
        return self.attempt("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
