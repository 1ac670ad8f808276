"""Files that are there whole or not at all, whatever ends the process: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["partial_files", "replacing"]

_PARTIAL: Final = re.compile(r"\.(?P<name>.+)\.\d+-\d+\.partial")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path``, for the block to write; it then becomes ``path``, and is on disk.

    If the block raises, ``path`` is as it was and the temporary file is gone. After a kill the temporary file
    may be left (see :func:`partial_files`).

    Raises:
        OSError: the file cannot be written or renamed.
    """
    # Through links: what is replaced is the file, not the link to it.
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield part
        _sync(part, os.O_RDWR)
        part.replace(target)
        if hasattr(os, "O_DIRECTORY"):  # elsewhere a folder cannot be opened, and the rename itself is durable
            _sync(target.parent, os.O_RDONLY)
    finally:
        part.unlink(missing_ok=True)


def partial_files(folder: Path) -> dict[Path, str]:
    """What killed writers left in ``folder``: each temporary file, and the name that it was going to have."""
    found = ((file, _PARTIAL.fullmatch(file.name)) for file in folder.iterdir())
    return {file: match["name"] for file, match in found if match is not None}


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
