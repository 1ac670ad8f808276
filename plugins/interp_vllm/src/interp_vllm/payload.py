"""Tensors from one process to another of this machine, through a file in shared memory.

The writer names the file and lists what is in it; the reader maps it and unlinks it at once, so nothing is
left behind when either side goes. Only bytes are shared: the index is plain lists, and nothing is unpickled.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from interp_core.errors import InterpError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["discard_payload", "discard_payloads_of", "read_payload", "write_payload"]

_FOLDER: Final = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_NAME: Final = re.compile(r"interp-[0-9]+-[0-9a-f]{32}")
_ALIGNMENT: Final = 64

Index = list[Any]
"""``[file name, bytes, [[key, dtype, shape, offset], ...]]``."""


def write_payload(tensors: Mapping[str, Tensor]) -> Index:
    """Put tensors into a new file; gives its index."""
    import torch

    entries: list[list[Any]] = []
    offset = 0
    for key, tensor in tensors.items():
        entries.append([key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if offset == 0:
        return ["", 0, entries]
    name = f"interp-{os.getpid()}-{uuid.uuid4().hex}"
    handle = os.open(_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserved, not only sized: a full shared memory is an error here, and not a bus error at a later write.
        os.posix_fallocate(handle, 0, offset)
        with mmap.mmap(handle, offset) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for (_, _, _, at), tensor in zip(entries, tensors.values(), strict=True):
                if tensor.nbytes:
                    part = whole[at : at + tensor.nbytes].view(tensor.dtype)
                    part.view(tensor.shape).copy_(tensor)
            del whole, part
    except OSError as error:
        (_FOLDER / name).unlink(missing_ok=True)
        raise InterpError(f"{offset} bytes do not fit into {_FOLDER}: {error}") from error
    finally:
        os.close(handle)
    return [name, offset, entries]


def read_payload(index: Sequence[Any], *, keep: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, which is gone afterwards. They share its memory, which lives as long as they do.

    Args:
        index: what :func:`write_payload` gave.
        keep: leave the file, for other readers; whoever made it discards it.

    Raises:
        InterpError: the index is not one, or its file is not there.
    """
    import torch

    name, size, entries = index
    if not size:
        return {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, dtype, shape, _ in entries}
    memory = _mapped(str(name), int(size), keep=keep)
    found: dict[str, Tensor] = {}
    for key, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        count = _count(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)
        found[key] = flat.to(dtype).reshape(shape)
    return found


def discard_payload(index: Sequence[Any]) -> None:
    """Remove a file that nobody will read."""
    if index and index[1] and _NAME.fullmatch(str(index[0])):
        (_FOLDER / str(index[0])).unlink(missing_ok=True)


def discard_payloads_of(pids: Sequence[int]) -> None:
    """Remove what processes that are gone have left."""
    for pid in pids:
        for path in _FOLDER.glob(f"interp-{int(pid)}-*"):
            path.unlink(missing_ok=True)


def _mapped(name: str, size: int, *, keep: bool) -> mmap.mmap:
    if not _NAME.fullmatch(name):
        raise InterpError(f"{name!r} is not the name of a file of captured rows")
    path = _FOLDER / name
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InterpError(f"captured rows are gone: {error}") from error
    try:
        if not keep:
            path.unlink(missing_ok=True)
        # A private mapping: what the caller does to a result stays the caller's.
        return mmap.mmap(handle, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(handle)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
