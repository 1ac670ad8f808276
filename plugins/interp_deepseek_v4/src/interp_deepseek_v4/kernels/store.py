"""The key/value side store: the exact rows beside vLLM's cache, which has room for fp8 only.

A row lies under the cache tensor and the slot that vLLM chose for it, so vLLM's own bookkeeping decides what is
read: its block tables say which slots a request has, and a slot that a later request is given is written again
before it is read. Into the bytes of the slot itself goes a *stamp*, a running number that the store keeps too.
They agree unless something happened to the cache that the store did not see (another layer that was given the
block, a copy of blocks, a transfer from another process), and then reading is an error and not a wrong number.
"""

from __future__ import annotations

import itertools
from typing import Final

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

# (address, rows per block, channels). Groups of layers that share a tensor never share a block of it.
Key = tuple[int, int, int]


@attrs.define
class _Table:
    """The rows of one cache tensor: of those of its blocks that were written so far, in the order of their first use.

    vLLM takes blocks from all over the cache, so rows in the order of their slots would take its whole size at once.
    """

    storage: StorageWeakRef
    block_size: int
    # For every block of the cache the place of its rows here, counted in blocks; -1 if it has none yet.
    places: torch.Tensor
    rows: torch.Tensor
    stamps: torch.Tensor
    used: int = 0

    @classmethod
    def empty(cls, cache: torch.Tensor, block_size: int, channels: int) -> _Table:
        """A table without rows for this cache."""
        return cls(
            storage=StorageWeakRef(cache.untyped_storage()),
            block_size=block_size,
            places=torch.full((cache.shape[0],), -1),
            rows=torch.zeros(0, channels),
            stamps=torch.zeros(0, dtype=torch.int32),
        )

    def make_room(self, slots: torch.Tensor) -> None:
        """Give a place to the blocks of these slots that have none."""
        blocks = torch.unique(slots // self.block_size)
        new = blocks[self.places[blocks] < 0]
        self.places[new] = torch.arange(self.used, self.used + new.numel())
        self.used += new.numel()
        missing = self.used * self.block_size - self.rows.shape[0]
        if missing > 0:
            # It doubles, so that a long run copies little, up to the size of the cache.
            most = self.places.numel() * self.block_size - self.rows.shape[0]
            extra = min(max(missing, self.rows.shape[0]), most)
            self.rows = torch.cat((self.rows, self.rows.new_zeros(extra, self.rows.shape[1])))
            self.stamps = torch.cat((self.stamps, self.stamps.new_zeros(extra)))

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the rows of these slots are; negative where their block has no place."""
        return self.places[slots // self.block_size] * self.block_size + slots % self.block_size


class SideStore:
    """Exact rows by `(cache tensor, slot)`. One a process; `cache` is `[blocks, bytes of a block]`, uint8."""

    def __init__(self) -> None:
        self._tables: dict[Key, _Table] = {}
        # Zero is what an empty cache holds, and int32 is what fits: the number starts over long after its last use.
        self._numbers = itertools.cycle(range(1, 2**31 - 1))

    def write(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep `rows` `[n, D]` under `slots` `[n]`; a negative slot is padding, and its row is dropped."""
        valid = slots >= 0
        if not bool(valid.any()):
            return
        slots, rows = slots[valid].long(), rows[valid].float()
        table = self._table(cache, block_size, rows.shape[1])
        table.make_room(slots)
        index = table.index(slots)
        # One number a call is enough: what it must tell apart are writings, not rows of one.
        stamp = next(self._numbers)
        table.rows[index] = rows
        table.stamps[index] = stamp
        words, block, word = _stamp_words(cache, block_size, slots)
        words[block, word] = stamp

    def read(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor, channels: int) -> torch.Tensor:
        """The rows `[..., D]` under `slots` `[...]`, zeros for a negative one.

        Raises `RuntimeError` for a slot whose content these kernels did not write.
        """
        valid = slots >= 0
        result = torch.zeros(*slots.shape, channels)
        if not bool(valid.any()):
            return result
        wanted = slots[valid].long()
        table = self._table(cache, block_size, channels)
        index = table.index(wanted)
        words, block, word = _stamp_words(cache, block_size, wanted)
        kept = table.stamps[index.clamp(min=0)] if table.used else torch.zeros(wanted.numel(), dtype=torch.int32)
        wrong = (index < 0) | (kept == 0) | (words[block, word] != kept)
        if bool(wrong.any()):
            raise RuntimeError(
                f"{int(wrong.sum())} of {wanted.numel()} key/value slots (the first: {int(wanted[wrong][0])}) hold "
                "what the reference kernels did not write there. They keep exact rows beside vLLM's cache, in this "
                "process only: key/value transfer, offloading and swapping cannot be used with them"
            )
        result[valid] = table.rows[index]
        return result

    def _table(self, cache: torch.Tensor, block_size: int, channels: int) -> _Table:
        """The table of this cache tensor, a new one if another tensor had its address before."""
        key = (cache.data_ptr(), block_size, channels)
        table = self._tables.get(key)
        if table is None or table.storage != StorageWeakRef(cache.untyped_storage()):
            # The caches of an engine that is gone go with it.
            self._tables = {k: t for k, t in self._tables.items() if not t.storage.expired() and k != key}
            table = self._tables[key] = _Table.empty(cache, block_size, channels)
        return table


def _stamp_words(
    cache: torch.Tensor, block_size: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache as 32-bit words, and for every slot the block and the word in it where its bytes begin."""
    words = cache.view(torch.int32)
    return words, slots // block_size, (slots % block_size) * (words.shape[1] // block_size)


STORE: Final = SideStore()
