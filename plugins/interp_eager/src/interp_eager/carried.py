"""What modules keep of a generation between its steps, where modelling code has it in modules and not in the cache.

Left there, the next call's would be taken for it: a stream beside other calls would go on with theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from attrs import define, field, frozen
from torch import nn

__all__ = ["Carried", "Place", "places"]

_NAMES: Final = ("conv1d_state", "recurrent_states", "rope_deltas")
"""Attributes of RecurrentGemma's recurrent blocks, and how far rotary positions of image wrappers are from columns."""


@frozen(eq=False)
class Place:
    """An attribute of a module that holds such a state; ``None`` where no generation is under way."""

    module: nn.Module
    name: str


def places(model: nn.Module) -> tuple[Place, ...]:
    """Where a model keeps states; empty for nearly all."""
    return tuple(Place(module, name) for module in model.modules() for name in _NAMES if name in vars(module))


@define(eq=False)
class Carried:
    """The states of one batch: in the modules during its steps, and here between them."""

    places: tuple[Place, ...]
    _states: list[Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._states = [None] * len(self.places)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The states are where the modelling code looks for them inside the block."""
        for place, state in zip(self.places, self._states, strict=True):
            setattr(place.module, place.name, state)
        try:
            yield
        finally:
            self._states = [getattr(place.module, place.name) for place in self.places]
            for place in self.places:
                setattr(place.module, place.name, None)
