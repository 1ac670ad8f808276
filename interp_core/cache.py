"""What a capture gives back: tensors by address, in the caller's own layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from interp_core.address import Address, parse_address, parse_pattern
from interp_core.cache_files import read_cache, write_cache
from interp_core.cache_rows import head_coordinate, is_pairwise, without_coordinates
from interp_core.casting import cast, read_dtype
from interp_core.errors import AddressError, RequestError, unknown_name
from interp_core.scalars import whole_number

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = ["Cache"]


@define(eq=False)
class Cache(Mapping[Address, "Tensor"]):
    """Captured tensors, ``[batch, pos, *axes]`` each (attention: ``[batch, heads, query, key]``).

    A mapping keyed by :class:`Address` that takes strings and ``(name, layer)`` tuples too. Where a whole point is
    here, its coordinates are: ``cache["z.3.head-4"]`` is a copy of that head of ``z.3``, while iteration and ``len``
    are about what was captured. Tensors are copies: changing one in place reaches neither the model nor another
    entry. Padding rows are zero.

    Attributes:
        tokens: token ids per prompt (generated tokens included where there are such rows).
        lengths: number of real rows per prompt.
        offsets: index of each prompt's first real row along ``pos``.
        positions: absolute positions of the rows, where only some were asked for; else ``None``.
        entries: of attention matrices with columns for compressed entries behind those of tokens, how many such
            columns are each prompt's own; empty on a trunk that compresses no keys.
        model_id: the model that it was captured from; ``None`` for a cache made by hand.
    """

    _tensors: dict[Address, Tensor]
    tokens: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    positions: tuple[tuple[int, ...], ...] | None = field(default=None)
    entries: dict[Address, tuple[int, ...]] = field(factory=dict)
    model_id: str | None = None

    def __getitem__(self, key: object) -> Tensor:
        found = self._found(parse_address(key))
        if found is None:
            raise AddressError("not in this cache: " + unknown_name("address", str(parse_address(key)), map(str, self)))
        return found

    def __contains__(self, key: object) -> bool:
        try:
            return self._found(parse_address(key)) is not None
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

    def _found(self, address: Address) -> Tensor | None:
        if address in self._tensors:
            return self._tensors[address]
        whole = self._tensors.get(address.bare())
        if whole is None or not address.coordinates:
            return None
        part = without_coordinates(whole, address, 1 if is_pairwise(address) else 2)
        return None if part is None else part.clone()

    # What is here.

    def mask(self) -> Tensor:
        """``[batch, pos]`` bool: which rows are real."""
        import torch

        width = max((o + n for o, n in zip(self.offsets, self.lengths, strict=True)), default=0)
        for address, tensor in self._tensors.items():
            width = tensor.shape[-2 if is_pairwise(address) else 1]
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
        if not is_pairwise(address):
            raise AddressError(f"{address} is no attention matrix: it has a row per position, and no keys")
        entries = max(self.entries.get(address) or self.entries.get(address.bare(), (0,)))
        return [f"token {i}" for i in range(columns - entries)] + [f"entry {i}" for i in range(entries)]

    def layers(self, name: str) -> tuple[int, ...]:
        """Layers at which a point is here, in order: the first axis of :meth:`stack`.

        Args:
            name: a point (``"resid_post"``), with coordinates too (``"z.*.head-4"``), or some of its layers
                (``"resid_post.4-8"``).
        """
        pattern = parse_pattern(name)
        one, span = pattern.address, pattern.layers
        first, last = span or ((0, None) if one.layer is None else (one.layer, one.layer))
        found = {a.layer for a in self._tensors if a.name == one.name and a.layer is not None}
        within = (layer for layer in sorted(found) if first <= layer and (last is None or layer <= last))
        return tuple(layer for layer in within if Address(one.name, layer, one.coordinates) in self)

    # Maths.

    def stack(self, name: str) -> Tensor:
        """One point over its layers: ``[layers, batch, pos, *axes]``, or ``[layers, batch, heads, query, key]``.

        Args:
            name: as :meth:`layers` takes it, which tells what layers those are.

        Raises:
            AddressError: the point is not here at any layer.
            RequestError: its widths differ between layers.
        """
        import torch

        one = parse_pattern(name).address
        tensors = [self[Address(one.name, layer, one.coordinates)] for layer in self.layers(name)]
        if not tensors:
            raise AddressError(f"{name!r} is not in this cache at any layer; it holds {', '.join(map(str, self))}")
        if len({t.shape for t in tensors}) > 1:
            raise RequestError(f"{name!r} has another shape on some layers, so it does not stack")
        return torch.stack(tensors)

    def heads(self, name: str, head: int | Sequence[int]) -> Tensor:
        """One head of a point, or several, over the layers that have it.

        Args:
            name: a point with heads, such as ``"z"``, ``"value"`` (whose heads are those of keys and values) or
                ``"attn_probs"``; captured whole or by these heads.
            head: its number, or a list of numbers.

        Returns:
            ``[layers, batch, pos, v_head_dim]`` for a number (attention: ``[layers, batch, query, key]``); for a
            list ``[layers, batch, pos, heads, v_head_dim]`` (attention: ``[layers, batch, heads, query, key]``),
            heads in the order of the list. The layers are ``cache.layers(f"{name}.*.head-{head}")``.

        Raises:
            AddressError: the point has no heads, or that one is not here.
            RequestError: ``head`` is no number, or widths differ between layers.
        """
        import torch

        coordinate = head_coordinate(name)
        wanted = list(head) if isinstance(head, Sequence) else [head]
        numbers = [whole_number(h) for h in wanted]
        if not numbers or any(n is None or n < 0 for n in numbers):
            raise RequestError(f"a head is a number from 0, or a list of such numbers, not {head!r}")
        found = [self.stack(f"{name}.*.{coordinate}-{n}") for n in numbers]
        if len(found) == 1 and not isinstance(head, Sequence):
            return found[0]
        return torch.stack(found, dim=2 if is_pairwise(Address(name)) else 3)

    def at(self, positions: Any) -> Cache:
        """The same cache with some rows only, as a capture of these positions gives it.

        Args:
            positions: absolute positions, a slice, or ``"last"``, of each prompt's own tokens; ``None`` for all.

        Returns:
            A cache whose tensors are ``[batch, positions, *axes]`` (attention: all keys of these queries); its
            ``positions`` say which rows those are, and prompts with fewer of them are padded on the right.

        Raises:
            RequestError: a prompt has no such position, or its row is not here.
        """
        from interp_core.assembly import with_positions

        return evolve(self) if positions is None else with_positions(self, positions)

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every captured tensor as a NumPy array, by its address as text; shapes are the tensors' own.

        NumPy has no bfloat16: such tensors become float32, which holds every one of their values exactly.
        Other dtypes stay.
        """
        import torch

        widened = {a: t.float() if t.dtype == torch.bfloat16 else t for a, t in self._tensors.items()}
        return {str(a): t.detach().cpu().resolve_neg().numpy() for a, t in widened.items()}

    def to(self, device: Any = None, dtype: Any = None) -> Cache:
        """The same cache with its tensors on another device, in another dtype, or both.

        Args:
            device: such as ``"cuda:0"``; ``None`` leaves them where they are.
            dtype: a floating dtype, or its name; ``None`` keeps each tensor's. Indices stay integers.

        Raises:
            RequestError: there is no such device or dtype, or a finite value would become infinite.
        """
        tensors = self._tensors
        if dtype is not None:
            wanted = read_dtype(dtype)
            tensors = {a: cast(t, wanted, str(a)) for a, t in tensors.items()}
        if device is not None:
            try:
                tensors = {a: t.to(device=device) for a, t in tensors.items()}
            except (RuntimeError, AssertionError, TypeError) as error:
                raise RequestError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
        return evolve(self, tensors=dict(tensors), entries=dict(self.entries))

    # On disk.

    def save(self, path: str | Path) -> Path:
        """Write all tensors, in their own shapes and dtypes, and everything else to one safetensors file.

        The metadata hold the layout (lengths and offsets, which :meth:`mask` is made of), tokens, positions, the
        model's id, and the versions that wrote it. The file is written under another name and renamed when it is
        whole: whatever happens meanwhile, a file of that name is the old one or the new one.

        Raises:
            RequestError: there is nothing to save, or the file cannot be written.
        """
        return write_cache(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Cache:
        """Read what :meth:`save` wrote, tensors on the CPU in the shapes and dtypes that were saved.

        Raises:
            ModelUnavailable: the file is missing, spoiled, not a saved cache, or of a later release.
        """
        tensors, fields = read_cache(path)
        return cls(tensors, **fields)
