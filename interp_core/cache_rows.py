"""Which rows and columns of a captured tensor are whose: coordinates, prompts, positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interp_core.address import COORDINATE_AXES, Address
from interp_core.errors import AddressError, RequestError
from interp_core.points import GENERAL_POINTS

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache

__all__ = ["MASKED", "head_coordinate", "held_positions", "is_pairwise", "own_rows", "without_coordinates"]

MASKED: Final = {"attn_scores": float("-inf")}
"""What a masked entry of an attention matrix holds, where it is not 0."""

_PAIRWISE: Final = frozenset(name for name, spec in GENERAL_POINTS.items() if not spec.positional)


def is_pairwise(address: Address) -> bool:
    """Whether a point has a query and a key axis in place of one row per position."""
    return address.name in _PAIRWISE


def head_coordinate(name: str) -> str:
    """The coordinate that names a head of the point ``name``: ``head``, or ``kv_head`` for keys and values.

    Raises:
        AddressError: the point has no axis of heads.
    """
    axes = GENERAL_POINTS[name].axes if name in GENERAL_POINTS else ()
    for coordinate in ("head", "kv_head"):
        if COORDINATE_AXES[coordinate] in axes:
            return coordinate
    raise AddressError(f"{name!r} has no heads; z, value, attn_scores and attn_probs have")


def without_coordinates(whole: Tensor, address: Address, lead: int) -> Tensor | None:
    """What ``address`` names of its whole point, whose axes begin at ``lead``; ``None`` if the axes are not known.

    Raises:
        AddressError: a coordinate counts past the end of its axis.
    """
    spec = GENERAL_POINTS.get(address.name)
    if spec is None or any(COORDINATE_AXES[name] not in spec.axes for name, _ in address.coordinates):
        return None
    found = [(spec.axes.index(COORDINATE_AXES[name]) + lead, name, index) for name, index in address.coordinates]
    # From the last axis on: those before keep their numbers.
    for axis, name, index in sorted(found, reverse=True):
        if index >= whole.shape[axis]:
            raise AddressError(f"{address}: {name} counts from 0 to {whole.shape[axis] - 1} here")
        whole = whole.select(axis, index)
    return whole


def held_positions(cache: Cache, prompt: int) -> tuple[int, ...]:
    """Absolute positions of a prompt's rows."""
    return cache.positions[prompt] if cache.positions is not None else tuple(range(cache.lengths[prompt]))


def own_rows(cache: Cache, address: Address, prompt: int) -> Tensor:
    """One prompt's rows without padding: ``[rows, *axes]``; of attention matrices ``[heads, rows, columns]``.

    Columns are one per token of the prompt, then one per compressed entry that is its own.
    """
    import torch

    tensor = cache[address][prompt]
    offset, length = cache.offsets[prompt], cache.lengths[prompt]
    if not is_pairwise(address):
        return tensor[offset : offset + length]
    entries = cache.entries.get(address, ())
    behind = tensor.shape[-1] - max(entries, default=0)
    keys = len(cache.tokens[prompt]) if cache.tokens else length
    if offset + keys > behind:
        raise RequestError(f"{address} has {behind} columns, and prompt {prompt} has {keys} tokens")
    block = tensor[..., offset : offset + length, :]
    if not entries:
        return block[..., offset : offset + keys]
    own = block[..., behind : behind + entries[prompt]]
    return torch.cat([block[..., offset : offset + keys], own], dim=-1)
