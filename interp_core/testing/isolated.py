"""Ask :mod:`interp_core.testing.probe` in a fresh interpreter, in an empty folder, with the path of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

__all__ = ["ask"]

_PATIENCE: Final = 180  # seconds: an engine may take half a minute to import


def ask(question: str, subject: str) -> dict[str, Any]:
    """What the probe answers.

    Returns:
        Its answer, or ``{"broken": text}`` if the interpreter ended or hung before it could answer.
    """
    with tempfile.TemporaryDirectory(prefix="interp-conformance-") as folder:
        answer, empty = Path(folder) / "answer.json", Path(folder) / "empty"
        empty.mkdir()
        # -P: the folder that the process runs in is not on its path, as it is not on that of an installed program.
        command = [sys.executable, "-P", "-m", "interp_core.testing.probe", question, subject, str(answer)]
        path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=empty, env=environ, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            return {"broken": f"it was not done after {_PATIENCE} seconds"}
        if not answer.is_file():
            said = (done.stderr or done.stdout).strip().splitlines()
            return {
                "broken": f"it ended the process (exit status {done.returncode}) {said[-1] if said else ''}".strip()
            }
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
