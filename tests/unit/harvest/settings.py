"""What most harvests of these tests are of, and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from interp_core import Cache
from interp_core.cache_rows import own_rows

__all__ = ["POINTS", "QUIET", "ROWS", "equal", "files"]

ROWS = [[5, 9, 11, 5, 77], [120, 42, 8], [200, 31, 64, 7], [9], [5, 9, 11, 5, 77], [31, 8], [64, 64, 64, 12]]
POINTS = ["resid_post.*", "z.1", "attn_scores.0", "value.1.kv_head-1"]
QUIET: dict[str, Any] = {"batch_size": 2, "shard_size": 4, "progress": False}


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())} if folder.is_dir() else {}


def equal(one: Cache, other: Cache, i: int) -> None:
    """The one prompt of ``one`` is prompt ``i`` of ``other``, bit for bit."""
    for address in other:
        assert torch.equal(one[address][0], own_rows(other, address, i)), str(address)
    assert one.tokens == (other.tokens[i],)
    assert one.positions == (None if other.positions is None else (other.positions[i],))
