"""Tensors that are split over tensor-parallel ranks: put together for a reader, and cut again after a write."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import field, frozen
from torch import Tensor, nn

from interp_core.converters import as_tuple
from interp_core.facts import LayerFacts

__all__ = ["Shard", "shard_of"]


@frozen(eq=False)
class Shard:
    """How the last axis of one module boundary is split.

    Attributes:
        parts: per concatenated part (queries, keys, values; gate, up) its width on this rank, and on how many
            neighbouring ranks each piece of it is repeated (key/value heads that are fewer than ranks).
        rank: this rank.
        size: number of ranks.
        all_gather: puts the last axes of all ranks together, in rank order.
    """

    parts: tuple[tuple[int, int], ...] = field(converter=as_tuple)
    rank: int
    size: int
    all_gather: Callable[[Tensor], Tensor]

    def gather(self, rows: Tensor) -> Tensor:
        """``[rows, local width]`` of this rank as ``[rows, whole width]``. Every rank has to call it."""
        widths = [width for width, _ in self.parts]
        by_rank = self.all_gather(rows).unflatten(-1, (self.size, sum(widths)))
        pieces = by_rank.split(widths, dim=-1)
        whole = [p[:, ::repeats].flatten(1) for p, (_, repeats) in zip(pieces, self.parts, strict=True)]
        return torch.cat(whole, dim=-1)

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of ``[rows, whole width]``."""
        whole = rows.split([width * (self.size // repeats) for width, repeats in self.parts], dim=-1)
        mine = []
        for piece, (width, repeats) in zip(whole, self.parts, strict=True):
            at = (self.rank // repeats) * width
            mine.append(piece[..., at : at + width])
        return torch.cat(mine, dim=-1)


def shard_of(
    role: str, side: str, module: nn.Module, kind: str, layer: LayerFacts | None, rank: int, size: int,
    all_gather: Callable[[Tensor], Tensor],
) -> Shard | None:  # fmt: skip
    """How a boundary is split over ``size`` ranks; ``None`` where every rank has all of it.

    Args:
        role: the module's role.
        side: ``input`` or ``output``.
        module: the module.
        kind: how a projection is split, as the adapter says.
        layer: the layer's facts.
        rank, size, all_gather: the group.
    """
    if size == 1 or layer is None:
        return None
    repeats = max(1, size // max(layer.n_kv_heads, 1))
    query = layer.n_heads // size * layer.head_dim
    key = max(1, layer.n_kv_heads // size) * layer.head_dim
    value = max(1, layer.n_kv_heads // size) * layer.v_head_dim
    parts: tuple[tuple[int, int], ...] = ()
    if role == "attn.q_norm":
        parts = ((query, 1),)
    elif role == "attn.k_norm":
        parts = ((key, repeats),)
    elif side == "output" and kind == "qkv":
        parts = ((query, 1), (key, repeats), (value, repeats))
    elif side == "output" and kind == "merged":
        parts = ((layer.d_mlp // size, 1),) * 2
    elif side == "output" and kind == "column" and not getattr(module, "gather_output", False):
        width = {"attn.v_proj": value}.get(role, int(module.output_size_per_partition))  # type: ignore[arg-type]
        parts = ((width, repeats if role == "attn.v_proj" else 1),)
    elif side == "input" and kind == "row" and getattr(module, "input_is_parallel", True):
        parts = ((int(module.input_size_per_partition), 1),)  # type: ignore[arg-type]
    return Shard(parts, rank, size, all_gather) if parts else None
