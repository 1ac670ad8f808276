"""What requests read: rows that are kept while a decoder runs, and handed back as torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from interp_core import Address, ModelProfile
from interp_core.requests import ForwardRequest, ForwardResult, Read
from interp_core.selection import axes_of
from interp_numpy.weights import Array

__all__ = ["Rows"]


@define(eq=False)
class Rows:
    """Rows of one request, over one forward or several. Called by the decoder with every tensor on the way."""

    profile: ModelProfile
    request: ForwardRequest
    _parts: dict[Address, list[Array]] = field(factory=dict, init=False)

    @property
    def names(self) -> set[str]:
        """Names of the points that are read."""
        return {read.address.name for read in self.request.reads}

    @property
    def depth(self) -> int:
        """How many blocks must run for what is read."""
        if self.names & {"final_norm", "lm_head"}:
            return self.profile.facts.n_layers
        layers = (read.address.layer for read in self.request.reads)
        return 1 + max((layer for layer in layers if layer is not None), default=-1)

    def __call__(self, name: str, layer: int | None, value: Array) -> None:
        """Keep a copy of what is wanted of a tensor."""
        for read in self.request.reads:
            if (read.address.name, read.address.layer) == (name, layer):
                self._parts.setdefault(read.address, []).append(self._cut(value, read))

    def result(self) -> ForwardResult:
        """Everything that was kept."""
        joined = {address: self._joined(address, parts) for address, parts in self._parts.items()}
        return ForwardResult(rows=joined)

    def _cut(self, value: Array, read: Read) -> Array:
        positional = self.profile.specs[read.address.name].positional
        _, coordinates = axes_of(self.profile, read.address)
        for axis, index in sorted(coordinates, reverse=True):
            value = value.take(index, axis=axis + positional)
        if read.positions is not None:
            value = value[list(read.positions)] if positional else value[..., list(read.positions), :]
        return np.array(value)

    def _joined(self, address: Address, parts: list[Array]) -> Tensor:
        if self.profile.specs[address.name].positional:
            return torch.from_numpy(np.concatenate(parts))
        # Later queries see more keys; those that earlier ones could not see are masked.
        masked, keys = -np.inf if address.name == "attn_scores" else 0.0, parts[-1].shape[-1]
        wide = [np.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, keys - p.shape[-1])], constant_values=masked) for p in parts]
        return torch.from_numpy(np.concatenate(wide, axis=-2))
