"""The names of tensors: ``name[.layer][.coordinate-N]...``.

This module knows the grammar only. Whether a name, a layer or a coordinate exists on a given model
is answered by that model's profile (:mod:`interp_core.resolution`).
"""

from __future__ import annotations

import re
from typing import Any, Final

from attrs import field, frozen

from interp_core.converters import as_tuple
from interp_core.errors import AddressError, unknown_name
from interp_core.scalars import whole_number

__all__ = ["COORDINATE_AXES", "Address", "AddressPattern", "parse_address", "parse_pattern"]

COORDINATE_AXES: Final[dict[str, str]] = {
    "head": "heads",
    "kv_head": "kv_heads",
    "neuron": "d_mlp",
    "expert": "experts",
    "stream": "streams",
}
"""Each coordinate, and the axis of a point that it indexes and removes."""

PATH_PREFIX: Final = "path."

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RANGE = re.compile(r"(\d+)-(\d+)")
_COORDINATE = re.compile(r"([A-Za-z_]+)-(-?\d+)")
_GRAMMAR = "an address is name[.layer][.coordinate-N], such as resid_post.10 or z.3.head-4"


@frozen
class Address:
    """One tensor of a model: a point, a layer where the point has one, and coordinates.

    Attributes:
        name: the point's name, or ``path.<dotted.module.path>`` for a module of the model itself.
        layer: the layer, counted from 0, or ``None`` for a point of the whole trunk.
        coordinates: ``(name, index)`` pairs, in the order written, such as ``(("head", 4),)``.
    """

    name: str
    layer: int | None = None
    coordinates: tuple[tuple[str, int], ...] = field(default=(), converter=as_tuple)

    @classmethod
    def parse(cls, value: object) -> Address:
        """Same as :func:`parse_address`."""
        return parse_address(value)

    @property
    def module_path(self) -> str | None:
        """The dotted module path of a ``path.`` address, else ``None``."""
        return self.name.removeprefix(PATH_PREFIX) if self.name.startswith(PATH_PREFIX) else None

    def coordinate(self, name: str) -> int | None:
        """The index of the coordinate ``name``, or ``None`` if this address has none such."""
        return dict(self.coordinates).get(name)

    def bare(self) -> Address:
        """The same point without its coordinates."""
        return Address(self.name, self.layer)

    def __str__(self) -> str:
        parts = [self.name]
        if self.layer is not None:
            parts.append(str(self.layer))
        parts.extend(f"{name}-{index}" for name, index in self.coordinates)
        return ".".join(parts)


@frozen
class AddressPattern:
    """An address whose layer may be a range. ``layers`` is ``None`` for one plain address."""

    address: Address
    layers: tuple[int, int | None] | None = None

    def expand(self, n_layers: int) -> tuple[Address, ...]:
        """Every address of the pattern on a trunk of ``n_layers`` layers.

        Raises:
            AddressError: the range ends before it begins or beyond the last layer.
        """
        if self.layers is None:
            return (self.address,)
        first, last = self.layers[0], n_layers - 1 if self.layers[1] is None else self.layers[1]
        if last < first:
            raise AddressError(f"{self.address.name}.{first}-{last}: the range ends before it begins")
        if last >= n_layers:
            raise AddressError(f"{self.address.name}.{first}-{last}: the layers of this model are 0 to {n_layers - 1}")
        return tuple(Address(self.address.name, i, self.address.coordinates) for i in range(first, last + 1))


def parse_address(value: object) -> Address:
    """Read one address from a string, an :class:`Address`, or a tuple ``(name, layer)``.

    Raises:
        AddressError: the text does not follow the grammar, or names a range of layers.
    """
    pattern = parse_pattern(value)
    if pattern.layers is not None:
        raise AddressError(
            f"{value!r} names several layers; one address is wanted here, such as {pattern.address.name}.0"
        )
    return pattern.address


def parse_pattern(value: object) -> AddressPattern:
    """Read an address or a layer range: ``resid_post.3``, ``resid_post.0-11``, ``resid_post.*``.

    Raises:
        AddressError: the text does not follow the grammar.
    """
    if isinstance(value, AddressPattern):
        return value
    if isinstance(value, Address):
        return AddressPattern(value)
    if isinstance(value, tuple):
        return AddressPattern(_from_tuple(value))
    if not isinstance(value, str):
        raise AddressError(f"{value!r} is not an address: {_GRAMMAR}")
    return _from_text(value)


def _from_tuple(value: tuple[Any, ...]) -> Address:
    if not value or not isinstance(value[0], str) or len(value) > 2:
        raise AddressError(f"{value!r} is not an address: a tuple is (name, layer), such as ('resid_post', 10)")
    address = parse_address(value[0])
    if len(value) == 1 or value[1] is None:
        return address
    if address.layer is not None or address.coordinates:
        raise AddressError(f"{value!r} gives a layer twice, or after a coordinate")
    return Address(address.name, _layer_number(value[1], value))


def _layer_number(layer: object, whole: object) -> int:
    # bool is an int, and True as a layer is always a mistake; NumPy integers have __index__.
    number = whole_number(layer)
    if number is None:
        raise AddressError(f"{whole!r}: a layer is a whole number, not {layer!r}")
    if number < 0:
        raise AddressError(f"{whole!r}: layers count from 0 and are never negative")
    return number


def _from_text(text: str) -> AddressPattern:
    if text.startswith(PATH_PREFIX):
        parts = text.removeprefix(PATH_PREFIX).split(".")
        if not all(parts) or any(part != part.strip() for part in parts):
            raise AddressError(f"{text!r}: a module path is path.<dotted.module.path>, such as path.model.layers.0.mlp")
        return AddressPattern(Address(text))
    name, *rest = text.split(".")
    if not _NAME.fullmatch(name):
        raise AddressError(f"{text!r} is not an address: {_GRAMMAR}")
    layer: int | None = None
    layers: tuple[int, int | None] | None = None
    if rest and rest[0] == "*":
        layers, rest = (0, None), rest[1:]
    elif rest and (span := _RANGE.fullmatch(rest[0])):
        layers, rest = (int(span[1]), int(span[2])), rest[1:]
    elif rest and re.fullmatch(r"[-+]?\d+", rest[0]):
        if not rest[0].isdigit():
            raise AddressError(f"{text!r}: layers count from 0 and are never negative")
        layer, rest = int(rest[0]), rest[1:]
    return AddressPattern(Address(name, layer, _coordinates(text, rest)), layers)


def _coordinates(text: str, parts: list[str]) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for part in parts:
        match = _COORDINATE.fullmatch(part)
        if match is None:
            raise AddressError(f"{text!r}: {part!r} is not a coordinate: {_GRAMMAR}")
        name, index = match[1], int(match[2])
        if name not in COORDINATE_AXES:
            raise AddressError(f"{text!r}: " + unknown_name("coordinate", name, COORDINATE_AXES))
        if index < 0:
            raise AddressError(f"{text!r}: coordinates count from 0 and are never negative")
        if name in found:
            raise AddressError(f"{text!r} gives the coordinate {name!r} twice")
        found[name] = index
    return tuple(found.items())
