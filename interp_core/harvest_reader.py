"""A harvest on disk, opened: nothing is read before it is asked for, and never more than is asked for."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_core.address import Address, parse_address
from interp_core.cache import Cache
from interp_core.cache_rows import without_coordinates
from interp_core.errors import AddressError, RequestError, unknown_name
from interp_core.harvest_index import Index, ShardRecord
from interp_core.harvest_shard import OpenShard
from interp_core.scalars import whole_number

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Harvest", "load_harvest"]


class Harvest:
    """What :func:`harvest` wrote, as a sequence of caches: one per text, in the order of the input.

    Shards are mapped into memory, one at a time, and only what is used of them is read from disk. Of a harvest that
    has not come to its end, the finished shards are here.

    Attributes:
        path: the folder.
        index: what it says of itself: settings, points, shards.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index = Index.read(self.path)
        self._points = {parse_address(name): point for name, point in self.index.points.items()}
        self._firsts = [shard.first for shard in self.index.shards]
        self._open: tuple[int, OpenShard] | None = None

    @classmethod
    def open(cls, out_dir: str | Path) -> Harvest:
        """Same as :func:`load_harvest`."""
        return cls(out_dir)

    @property
    def complete(self) -> bool:
        """Whether every text of the input is here."""
        return self.index.complete

    @property
    def model_id(self) -> str:
        """The model that it was captured from."""
        return str(self.index.settings["model"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that the numbers depend on but the texts."""
        return self.index.settings

    @property
    def addresses(self) -> tuple[Address, ...]:
        """What was captured, in the order of the request."""
        return tuple(self._points)

    @property
    def n_rows(self) -> int:
        """Rows of each point over all texts."""
        return self.index.total("rows")

    @property
    def truncated(self) -> int:
        """How many texts were cut at ``max_length``."""
        return self.index.total("truncated")

    def __len__(self) -> int:
        return self.index.total("texts")

    def __repr__(self) -> str:
        state = "" if self.complete else ", not complete"
        points = ", ".join(map(str, self.addresses[:4])) + (", ..." if len(self._points) > 4 else "")
        return f"<Harvest {str(self.path)!r}, {len(self)} texts, {self.n_rows} rows of {points or None}{state}>"

    def __getitem__(self, number: object) -> Cache:
        """Text ``number``, from 0, as a cache of one prompt: ``[1, rows, *axes]`` each.

        Raises:
            RequestError: there is no such text.
            ModelUnavailable: its shard is missing or spoiled.
        """
        shard, within = self._where(number)
        return shard.cache(within, self._points, self.model_id)

    def __iter__(self) -> Iterator[Cache]:
        return (self[number] for number in range(len(self)))

    def tokens(self, number: int) -> tuple[int, ...]:
        """Token ids of text ``number``, as they went through the model.

        Raises:
            RequestError, ModelUnavailable: as ``h[number]``.
        """
        shard, within = self._where(number)
        return shard.tokens(within)

    def rows(self, address: object) -> Iterator[Tensor]:
        """All rows of a point, shard by shard: ``[rows, *axes]`` each, mapped from the file.

        Rows of a text follow each other, and texts follow in the order of the input. Coordinates of a point that was
        captured whole are taken from it.

        Raises:
            AddressError: the point was not captured, or is an attention matrix, which ``h[number]`` gives.
            ModelUnavailable: a shard is missing or spoiled.
        """
        wanted = parse_address(address)
        held = wanted if wanted in self._points else wanted.bare()
        if held not in self._points:
            names = map(str, self._points)
            raise AddressError("not in this harvest: " + unknown_name("address", str(wanted), names))
        if self._points[held]["pairwise"]:
            raise AddressError(f"{wanted} is an attention matrix per text and has no rows to put together; h[i] has it")
        return self._rows(wanted, held)

    def _rows(self, wanted: Address, held: Address) -> Iterator[Tensor]:
        for number in range(len(self.index.shards)):
            whole = self._shard(number).all_rows(held)
            part = whole if wanted == held else without_coordinates(whole, wanted, 1)
            if part is None:
                raise AddressError(f"{wanted}: the axes of {held} are not known here; index its rows")
            yield part

    def _where(self, number: object) -> tuple[OpenShard, int]:
        found = whole_number(number)
        if found is None or not -len(self) <= found < len(self):
            raise RequestError(f"a text is a number from 0 to {len(self) - 1}, not {number!r}")
        found %= len(self)
        place = bisect.bisect_right(self._firsts, found) - 1
        return self._shard(place), found - self._firsts[place]

    def _shard(self, number: int) -> OpenShard:
        if self._open is None or self._open[0] != number:
            record: ShardRecord = self.index.shards[number]
            self._open = number, OpenShard.open(self.path / record.file, self.index.fingerprint, record.bytes)
        return self._open[1]


def load_harvest(out_dir: str | Path) -> Harvest:
    """Open what :func:`harvest` wrote, also one that has not come to its end.

    Raises:
        ModelUnavailable: the folder holds no harvest, or a spoiled one.
    """
    return Harvest(out_dir)
