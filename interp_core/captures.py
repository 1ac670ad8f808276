"""Everything that a model serves over one prompt, captured when it is first asked for, for identities to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from interp_core.address import Address
from interp_core.checks import Get
from interp_core.discovery import one_line
from interp_core.errors import InterpError
from interp_core.functions import run_with_cache
from interp_core.points import PointSpec
from interp_core.profile import ModelProfile

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache
    from interp_core.model import InterpModel

__all__ = ["Capture", "getter", "layers_of", "parts_of", "prompt_like"]


def layers_of(spec: PointSpec, profile: ModelProfile) -> Sequence[int | None]:
    """Where a point can be: ``[None]`` for a trunk point, else every layer."""
    return [None] if spec.scope == "trunk" else range(profile.facts.n_layers)


def parts_of(profile: ModelProfile, spec: PointSpec, layer: int | None) -> list[Address]:
    """What reads a point whole: itself, or its single streams where it is refused as a stack; nothing if not served."""
    whole = Address(spec.name, layer)
    if profile.read_refusal(whole) is None:
        return [whole]
    if spec.axes[:1] != ("streams",):
        return []
    streams = [Address(spec.name, layer, (("stream", k),)) for k in range(profile.facts.n_streams)]
    return [address for address in streams if profile.read_refusal(address) is None]


def getter(rows: Mapping[Address, Tensor], n_streams: int) -> Get:
    """Captured rows by point and layer, the streams of a stack put together; ``None`` for what was not captured."""
    import torch

    def get(name: str, layer: int | None) -> Tensor | None:
        if Address(name, layer) in rows:
            return rows[Address(name, layer)]
        parts = [rows.get(Address(name, layer, (("stream", k),))) for k in range(n_streams)]
        whole = [part for part in parts if part is not None]
        return torch.stack(whole, dim=1) if n_streams > 1 and len(whole) == n_streams else None

    return get


@define(eq=False)
class Capture:
    """One prompt of one model.

    Attributes:
        model: the model.
        tokens: the prompt's ids.
        addresses: what is captured; ``None`` for every point that is served.
        errors: of the addresses that are said to be served and cannot be read, once ``rows`` were asked for.
    """

    model: InterpModel
    tokens: list[int]
    addresses: Sequence[Address] | None = None
    errors: dict[Address, str] = field(factory=dict, init=False)
    _cache: Cache | None = field(default=None, init=False)
    _rows: dict[Address, Tensor] | None = field(default=None, init=False)

    @property
    def cache(self) -> Cache:
        """All of it, as :func:`~interp_core.functions.run_with_cache` gives it."""
        if self._cache is None:
            self._cache = run_with_cache(self.model, self.tokens, self._served())
        return self._cache

    @property
    def rows(self) -> Mapping[Address, Tensor]:
        """What of it can be read, without the batch axis: ``[pos, *axes]`` or ``[heads, query, key]``."""
        if self._rows is None:
            self._rows = self._readable(self._served())
        return self._rows

    @property
    def get(self) -> Get:
        """See :func:`getter`."""
        return getter(self.rows, self.model.facts.n_streams)

    def _readable(self, addresses: Sequence[Address]) -> dict[Address, Tensor]:
        """All at once; point by point, then place by place, only where that fails."""
        self.model.warmup()  # A model that cannot be loaded is no matter of single points.
        try:
            whole = addresses == self._served()
            cache = self.cache if whole else run_with_cache(self.model, self.tokens, addresses)
        except InterpError as error:
            groups: dict[object, list[Address]] = {}
            for address in addresses:
                groups.setdefault(address.name if whole else address, []).append(address)
            if len(addresses) == 1:
                self.errors[addresses[0]] = one_line(error)
                return {}
            return {a: rows for group in groups.values() for a, rows in self._readable(group).items()}
        return {address: cache[address][0] for address in cache}

    def _served(self) -> Sequence[Address]:
        if self.addresses is not None:
            return self.addresses
        profile = self.model.profile
        places = ((spec, layer) for spec in profile.points() for layer in layers_of(spec, profile))
        return [address for spec, layer in places for address in parts_of(profile, spec, layer)]


def prompt_like(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Another prompt as long as ``tokens``, with another id at every position if the vocabulary has two."""
    found = [(token * 3 + 17) % vocab_size for token in tokens]
    return [(new + 1) % vocab_size if new == old else new for new, old in zip(found, tokens, strict=True)]
