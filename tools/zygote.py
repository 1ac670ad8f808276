"""Short programs in processes of their own that begin with torch and transformers imported.

Importing the two takes four seconds of a core, which is most of what a block of the documentation or a call of
`interp` costs. A process that has done nothing but import them is forked for each program; this project's own packages
are not among what it imported, and the program ends as any Python program does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_IMPORTED = (
    "torch",
    "safetensors.torch",
    "tokenizers",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "typer",
    "rich.progress",
    "rich.table",
)


class Zygote:
    """The process that is forked; a context manager, which ends it."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)

    def run(
        self,
        code: str,
        arguments: Iterable[str] = (),
        folder: Path | None = None,
        timeout: int = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` as a script with these arguments, and wait for its end; a timeout ends it with SIGALRM."""
        with tempfile.TemporaryDirectory() as outputs:
            files = [Path(outputs, name) for name in ("stdout", "stderr")]
            request = {
                "code": code,
                "arguments": ["-", *arguments],
                "folder": str(folder or Path.cwd()),
                "environment": dict(os.environ),
                "outputs": [str(file) for file in files],
                "timeout": timeout,
            }
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            status = int(self._server.stdout.readline())
            out, err = (file.read_text(encoding="utf-8") for file in files)
        return subprocess.CompletedProcess(["-", *arguments], status, out, err)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()


def serve() -> None:
    """Fork for each line of standard input; say each program's exit status."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # Or each program's first collection would touch, and so copy, all that was imported.
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    _leave(0)


def become(
    code: str, arguments: list[str], folder: str, environment: dict[str, str], outputs: list[str], timeout: int
) -> NoReturn:
    """Be the program from here on, to the end of the process."""
    signal.alarm(timeout)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    sys.path[0] = ""
    sys.modules["__main__"] = ModuleType("__main__")
    ended: list[int] = []
    # What the program registers runs before this, and nothing after it: taking apart what was imported takes a second.
    atexit.register(lambda: _leave(ended[0]))
    try:
        exec(compile(code, "<program>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as end:
        ended.append(end.code if isinstance(end.code, int) else int(bool(end.code)))
    except BaseException:  # noqa: BLE001 - it is shown, as at the end of any program
        traceback.print_exc()
        ended.append(1)
    else:
        ended.append(0)
    sys.exit()


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
