"""One shard of a harvest: rows of its texts one behind the other, without padding, in one safetensors file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from interp_core.address import Address
from interp_core.cache import Cache
from interp_core.cache_rows import is_pairwise, own_rows
from interp_core.casting import cast
from interp_core.durable import replacing
from interp_core.errors import ModelUnavailable, RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["OpenShard", "Shard"]

_METADATA: Final = "interp_harvest"
_TOKENS: Final = "harvest.tokens"
_LENGTHS: Final = "harvest.lengths"
_ROWS: Final = "harvest.rows"
_POSITIONS: Final = "harvest.positions"
_COLUMNS: Final = "harvest.columns."

_AGAIN: Final = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""How far rows of the same texts may be apart when they are computed again, relative to their norm."""

_SHARE: Final = 0.1
"""Of indices, how many may be others: experts change places where their weights are nearly equal."""


@define(eq=False)
class Shard:
    """Rows of the texts of one shard, until it is written.

    Attributes:
        addresses: what is kept, in the order of the request.
        tokens: token ids per text.
        positions: absolute positions of the rows that were asked for, per text; ``None`` for all.
        dtype: dtype to keep floating tensors in; ``None`` for the model's.
    """

    addresses: tuple[Address, ...]
    tokens: Sequence[tuple[int, ...]]
    positions: Sequence[tuple[int, ...]] | None
    dtype: torch.dtype | None
    _tensors: dict[Address, Tensor] = field(factory=dict, init=False)
    _matrices: dict[Address, list[Tensor]] = field(factory=dict, init=False)
    _filled: int = field(default=0, init=False)

    @property
    def rows(self) -> list[int]:
        """Number of rows of each text."""
        return [len(row) for row in (self.tokens if self.positions is None else self.positions)]

    def add(self, cache: Cache) -> None:
        """Take over the rows of the next texts.

        Raises:
            RequestError: a value does not fit ``dtype``.
        """
        for address in self.addresses:
            for i, rows in enumerate(cache.lengths):
                own = own_rows(cache, address, i)
                own = own if self.dtype is None else cast(own, self.dtype, str(address))
                if is_pairwise(address):
                    # A copy: a view would keep the whole batch.
                    self._matrices.setdefault(address, []).append(own.clone())
                else:
                    start = self._filled + sum(cache.lengths[:i])
                    self._place(address, own)[start : start + rows] = own
        self._filled += sum(cache.lengths)

    def points(self) -> dict[str, dict[str, Any]]:
        """What the index says of each point."""
        found = {}
        for address in self.addresses:
            pairwise = is_pairwise(address)
            tensor = self._matrices[address][0] if pairwise else self._tensors[address]
            axes = list(tensor.shape[:-2] if pairwise else tensor.shape[1:])
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[str(address)] = {"dtype": dtype, "axes": axes, "pairwise": pairwise}
        return found

    def values(self, address: Address) -> Tensor:
        """A point as it stands in the file: ``[rows, *axes]`` so far; of matrices all numbers, text by text."""
        import torch

        if is_pairwise(address):
            return torch.cat([matrix.flatten() for matrix in self._matrices[address]])
        return self._tensors[address][: self._filled]

    def write(self, path: Path, fingerprint: str) -> int:
        """Write it, whole or not at all; its size in bytes.

        Raises:
            RequestError: it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {str(address): self.values(address) for address in self.addresses}
        for address, matrices in self._matrices.items():
            tensors[f"{_COLUMNS}{address}"] = _integers([matrix.shape[-1] for matrix in matrices])
        tensors[_TOKENS] = _integers(list(itertools.chain.from_iterable(self.tokens)))
        tensors[_LENGTHS] = _integers(list(map(len, self.tokens)))
        tensors[_ROWS] = _integers(self.rows)
        if self.positions is not None:
            tensors[_POSITIONS] = _integers(list(itertools.chain.from_iterable(self.positions)))
        try:
            with replacing(path) as part:
                save_file(tensors, str(part), metadata={_METADATA: fingerprint})
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path} cannot be written: {error}") from error
        return path.stat().st_size

    def _place(self, address: Address, like: Tensor) -> Tensor:
        """The tensor of all rows of the shard, made when its shape is first seen."""
        if address not in self._tensors:
            self._tensors[address] = like.new_empty((sum(self.rows), *like.shape[1:]))
        return self._tensors[address]


@define(eq=False)
class OpenShard:
    """A shard on disk, mapped into memory: what is not looked at is not read."""

    path: Path
    _file: Any
    _lengths: list[int]
    _rows: list[int]

    @classmethod
    def open(cls, path: Path, fingerprint: str, size: int) -> OpenShard:
        """Open it.

        Raises:
            ModelUnavailable: the file is missing, spoiled, or of another harvest.
        """
        from safetensors import SafetensorError, safe_open

        try:
            found = path.stat().st_size
            if found != size:
                raise ModelUnavailable(f"{path} is spoiled: it has {found} bytes, and its index says {size}")
            file: Any = safe_open(str(path), framework="pt")
            if (file.metadata() or {}).get(_METADATA) != fingerprint:
                raise ModelUnavailable(f"{path} is not a shard of this harvest")
            return cls(path, file, file.get_tensor(_LENGTHS).tolist(), file.get_tensor(_ROWS).tolist())
        except (OSError, SafetensorError) as error:
            raise ModelUnavailable(f"{path} cannot be read as a shard of a harvest: {error}") from error

    def all_rows(self, address: Address) -> Tensor:
        """``[rows, *axes]`` of a point with rows, mapped from the file."""
        found: Tensor = self._file.get_tensor(str(address))
        return found

    def unlike(self, again: Shard) -> str | None:
        """Whether the first rows are others than those of ``again``, which are of the same texts; which, in words."""
        for address in again.addresses:
            values = again.values(address)
            if _unlike(self._file.get_slice(str(address))[: len(values)], values):
                return f"{address} has other values"
        return None

    def tokens(self, number: int) -> tuple[int, ...]:
        """Token ids of a text of this shard."""
        return tuple(self._part(_TOKENS, self._lengths, number).tolist())

    def cache(self, number: int, points: Mapping[Address, Mapping[str, Any]], model_id: str) -> Cache:
        """One text of this shard as a cache of one prompt."""
        tokens, rows = self.tokens(number), self._rows[number]
        positions = None
        if _POSITIONS in self._file.keys():  # noqa: SIM118 - no mapping
            positions = (tuple(self._part(_POSITIONS, self._rows, number).tolist()),)
        tensors: dict[Address, Tensor] = {}
        entries: dict[Address, tuple[int, ...]] = {}
        for address, point in points.items():
            if not point["pairwise"]:
                tensors[address] = self._part(str(address), self._rows, number)[None]
                continue
            columns = self._file.get_tensor(f"{_COLUMNS}{address}").tolist()
            heads = math.prod(point["axes"])
            sizes = [heads * n * width for n, width in zip(self._rows, columns, strict=True)]
            shape = (1, *point["axes"], rows, columns[number])
            tensors[address] = self._part(str(address), sizes, number).reshape(shape)
            if columns[number] > len(tokens):
                entries[address] = (columns[number] - len(tokens),)
        return Cache(tensors, (tokens,), (rows,), (0,), positions, entries, model_id)

    def _part(self, name: str, sizes: Sequence[int], number: int) -> Tensor:
        start = sum(sizes[:number])
        found: Tensor = self._file.get_slice(name)[start : start + sizes[number]]
        return found


def _integers(values: list[int]) -> Tensor:
    import torch

    return torch.tensor(values, dtype=torch.int32)


def _unlike(stored: Tensor, again: Tensor) -> bool:
    """Whether two tensors differ by more than engines do that batch and sum as they like."""
    import torch

    if torch.equal(stored, again):
        return False
    if stored.shape != again.shape or stored.dtype != again.dtype:
        return True
    if not stored.is_floating_point():
        return float((stored != again).double().mean()) > _SHARE
    if not torch.equal(stored.isfinite(), again.isfinite()):
        return True
    # Row by row, and their median: a few channels of a few rows are often larger than all the others together.
    lead = 1 if stored.dim() == 1 else len(stored)
    x, y = (t.double().nan_to_num(0.0, 0.0, 0.0).reshape(lead, -1) for t in (stored, again))
    apart = ((x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-300)).median()
    return float(apart) > _AGAIN[str(stored.dtype).removeprefix("torch.")]
