"""What a capture gives back: tensors by address, in the caller's own layout."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from interp_core.address import Address, parse_address
from interp_core.errors import AddressError, ModelUnavailable, RequestError, unknown_name
from interp_core.points import GENERAL_POINTS

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.requests import ForwardResult
    from interp_core.tokens import TokenBatch

__all__ = ["Cache", "assemble"]

_METADATA = "interp_cache"
_PAIRWISE = frozenset(name for name, spec in GENERAL_POINTS.items() if not spec.positional)


@define(eq=False)
class Cache(Mapping[Address, "Tensor"]):
    """Captured tensors, ``[batch, pos, *axes]`` each (attention: ``[batch, heads, query, key]``).

    A mapping keyed by :class:`Address` that takes strings and ``(name, layer)`` tuples too. Tensors are
    copies: changing one in place reaches neither the model nor another entry. Padding rows are zero.

    Attributes:
        tokens: token ids per prompt (generated tokens included where there are such rows).
        lengths: number of real rows per prompt.
        offsets: index of each prompt's first real row along ``pos``.
        positions: absolute positions of the rows, where only some were asked for; else ``None``.
        entries: of attention matrices with columns for compressed entries behind those of tokens, how many such
            columns are each prompt's own; empty on a trunk that compresses no keys.
    """

    _tensors: dict[Address, Tensor]
    tokens: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    positions: tuple[tuple[int, ...], ...] | None = field(default=None)
    entries: dict[Address, tuple[int, ...]] = field(factory=dict)

    def __getitem__(self, key: object) -> Tensor:
        address = parse_address(key)
        try:
            return self._tensors[address]
        except KeyError:
            raise AddressError("not in this cache: " + unknown_name("address", str(address), map(str, self))) from None

    def __contains__(self, key: object) -> bool:
        try:
            return parse_address(key) in self._tensors
        except AddressError:
            return False

    def get(self, key: object, default: Any = None) -> Any:
        """The tensor at ``key``, or ``default`` where it is not here."""
        try:
            return self[key]
        except AddressError:
            return default

    def __iter__(self) -> Iterator[Address]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        shown = ", ".join(f"{a}: {list(t.shape)}" for a, t in list(self._tensors.items())[:6])
        more = f", ... {len(self) - 6} more" if len(self) > 6 else ""
        return f"Cache({shown}{more})"

    def mask(self) -> Tensor:
        """``[batch, pos]`` bool: which rows are real."""
        import torch

        width = max((o + n for o, n in zip(self.offsets, self.lengths, strict=True)), default=0)
        for address, tensor in self._tensors.items():
            width = tensor.shape[-2 if address.name in _PAIRWISE else 1]
            break
        mask = torch.zeros(len(self.lengths), width, dtype=torch.bool)
        for i, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            mask[i, offset : offset + length] = True
        return mask

    def key_labels(self, key: object) -> list[str]:
        """What each column of an attention matrix is: ``token 0``, ..., and ``entry 0``, ... behind compressed keys.

        Raises:
            AddressError: there is no such matrix here.
        """
        address = parse_address(key)
        columns = self[address].shape[-1]
        if address.name not in _PAIRWISE:
            raise AddressError(f"{address} is no attention matrix: it has a row per position, and no keys")
        entries = max(self.entries.get(address, (0,)))
        return [f"token {i}" for i in range(columns - entries)] + [f"entry {i}" for i in range(entries)]

    def layers(self, name: str) -> tuple[int, ...]:
        """Layers at which the point ``name`` (without coordinates) is here, in order."""
        found = {a.layer for a in self._tensors if a.name == name and not a.coordinates and a.layer is not None}
        return tuple(sorted(found))

    def stack(self, name: str) -> Tensor:
        """The point ``name`` over its layers: ``[layers, batch, pos, *axes]``.

        Raises:
            AddressError: the point is not here at any layer.
            RequestError: its widths differ between layers.
        """
        import torch

        layers = self.layers(name)
        if not layers:
            raise AddressError(f"{name!r} is not in this cache at any layer; it holds {', '.join(map(str, self))}")
        tensors = [self._tensors[Address(name, layer)] for layer in layers]
        if len({t.shape for t in tensors}) > 1:
            raise RequestError(f"{name!r} has another shape on some layers, so it does not stack")
        return torch.stack(tensors)

    def to(self, device: str) -> Cache:
        """The same cache with its tensors on another device.

        Raises:
            RequestError: there is no such device.
        """
        try:
            moved = {a: t.to(device) for a, t in self._tensors.items()}
        except (RuntimeError, AssertionError) as error:
            raise RequestError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
        return Cache(moved, self.tokens, self.lengths, self.offsets, self.positions, dict(self.entries))

    def save(self, path: str | Path) -> Path:
        """Write all tensors and the layout to one safetensors file.

        Raises:
            RequestError: there is nothing to save, or the file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._tensors:
            raise RequestError("this cache is empty: there is nothing to save")
        meta = {name: getattr(self, name) for name in ("tokens", "lengths", "offsets", "positions")}
        meta["entries"] = {str(address): counts for address, counts in self.entries.items()}
        tensors = {str(a): t.detach().contiguous().cpu() for a, t in self._tensors.items()}
        owners = {t.untyped_storage().data_ptr(): name for name, t in tensors.items()}
        # The format has no shared memory: of tensors that share, all but one are copied.
        for name, tensor in tensors.items():
            if owners[tensor.untyped_storage().data_ptr()] != name:
                tensors[name] = tensor.clone()
        try:
            save_file(tensors, str(path), metadata={_METADATA: json.dumps(meta)})
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{path} cannot be written: {error}") from error
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Cache:
        """Read what :meth:`save` wrote.

        Raises:
            ModelUnavailable: the file is missing, corrupt, or not a saved cache.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                written = (file.metadata() or {}).get(_METADATA)
                if written is None:
                    raise ModelUnavailable(f"{path} is a safetensors file, but not one that Cache.save wrote")
                meta = json.loads(written)
                tensors = {parse_address(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            rows = tuple(tuple(r) for r in meta["tokens"])
            positions = None if meta["positions"] is None else tuple(tuple(p) for p in meta["positions"])
            lengths, offsets = (tuple(map(operator.index, meta[name])) for name in ("lengths", "offsets"))
            entries = {parse_address(key): tuple(counts) for key, counts in meta.get("entries", {}).items()}
            return cls(tensors, rows, lengths, offsets, positions, entries)
        except (OSError, SafetensorError, json.JSONDecodeError, AddressError, LookupError, TypeError) as error:
            raise ModelUnavailable(f"{path} cannot be read as a saved cache: {error}") from error


def assemble(
    batch: TokenBatch,
    tokens: Sequence[Sequence[int]],
    results: Sequence[ForwardResult],
    positions: Sequence[tuple[int, ...] | None],
    pairwise: Mapping[Address, float],
    addresses: Sequence[Address],
) -> Cache:
    """Put each request's rows into the caller's layout.

    Args:
        batch: the caller's prompts and layout.
        tokens: tokens that went through the forward, per request.
        results: per request.
        positions: absolute positions that were asked for, per request; ``None`` for all.
        pairwise: addresses with a query and a key axis, each with the value of a masked entry.
        addresses: what to assemble, in order.
    """
    chosen = any(p is not None for p in positions)
    lengths = tuple(len(t) if p is None else len(p) for t, p in zip(tokens, positions, strict=True))
    offsets = (0,) * len(lengths) if chosen else batch.offsets
    width = max((o + n for o, n in zip(offsets, lengths, strict=True)), default=0)
    width = width if chosen else max(width, batch.width)
    key_width = max((o + len(t) for o, t in zip(offsets, tokens, strict=True)), default=0)
    key_width = key_width if chosen else max(key_width, batch.width)
    tensors: dict[Address, Tensor] = {}
    entries: dict[Address, tuple[int, ...]] = {}
    for address in addresses:
        rows = [result.rows[address] for result in results]
        if address in pairwise:
            # One column per token; what stands behind them are compressed entries.
            extra = tuple(row.shape[-1] - len(t) for row, t in zip(rows, tokens, strict=True))
            if any(extra):
                entries[address] = extra
            tensors[address] = _place_pairs(rows, offsets, width, key_width, extra, pairwise[address])
        else:
            tensors[address] = _place(rows, offsets, width)
    where = tuple(p or () for p in positions) if chosen else None
    return Cache(tensors, tuple(tuple(t) for t in tokens), lengths, offsets, where, entries)


def _place(rows: list[Tensor], offsets: Sequence[int], width: int) -> Tensor:
    whole = None if any(offsets) else _common_base(rows, width)
    if whole is not None:
        return whole
    out = rows[0].new_zeros((len(rows), width, *rows[0].shape[1:]))
    for i, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        out[i, offset : offset + row.shape[0]] = row
    return out


def _common_base(rows: list[Tensor], width: int) -> Tensor | None:
    """The tensor whose consecutive slices ``rows`` are, so that a whole batch need not be copied again."""
    base = rows[0]._base
    if base is None or tuple(base.shape[:2]) != (len(rows), width):
        return None
    for i, row in enumerate(rows):
        if row._base is not base or row.shape != base.shape[1:] or row.data_ptr() != base[i].data_ptr():
            return None
    return base


def _place_pairs(
    rows: list[Tensor], offsets: Sequence[int], width: int, key_width: int, entries: Sequence[int], masked: float
) -> Tensor:
    """Attention matrices: a real query's padded keys are masked; padded queries are zero rows."""
    lead = rows[0].shape[:-2]
    out = rows[0].new_zeros((len(rows), *lead, width, key_width + max(entries)))
    for i, (row, offset, extra) in enumerate(zip(rows, offsets, entries, strict=True)):
        queries, keys = row.shape[-2], row.shape[-1] - extra
        block = out[i, ..., offset : offset + queries, :]
        block.fill_(masked)
        block[..., offset : offset + keys] = row[..., :keys]
        block[..., key_width : key_width + extra] = row[..., keys:]
    return out
