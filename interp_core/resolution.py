"""From what a user wrote to addresses that exist on a model: names, layers and coordinates checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from interp_core.address import COORDINATE_AXES, Address, parse_address, parse_pattern
from interp_core.errors import AddressError, unknown_name
from interp_core.facts import ModelFacts
from interp_core.points import PointSpec

__all__ = ["axis_sizes", "resolve_address", "resolve_addresses"]


def resolve_address(value: object, specs: Mapping[str, PointSpec], facts: ModelFacts) -> Address:
    """One address that exists on the model described by ``specs`` and ``facts``.

    Raises:
        AddressError: the name, layer or coordinate does not exist; the message says what is valid.
    """
    address = parse_address(value)
    _check(address, specs, facts)
    return address


def resolve_addresses(values: object, specs: Mapping[str, PointSpec], facts: ModelFacts) -> tuple[Address, ...]:
    """Addresses for a request: ranges expanded, duplicates dropped, order kept.

    Raises:
        AddressError: as :func:`resolve_address`, or ``values`` is one string rather than a list of them.
    """
    if isinstance(values, (str, Address)):
        raise AddressError(f"points are a list of addresses, such as [{str(values)!r}], not one string")
    if not isinstance(values, Iterable):
        raise AddressError(f"points are a list of addresses, not {values!r}")
    found: dict[Address, None] = {}
    for value in values:
        pattern = parse_pattern(value)
        if pattern.layers is not None:
            _known_name(pattern.address.name, specs, pattern.address)
            _check_scope(pattern.address, specs[pattern.address.name], facts, ranged=True)
        for address in pattern.expand(facts.n_layers):
            _check(address, specs, facts)
            found[address] = None
    return tuple(found)


def axis_sizes(address: Address, spec: PointSpec, facts: ModelFacts) -> tuple[int, ...]:
    """Sizes of the last axes of ``address``, without those that its coordinates remove.

    ``query`` and ``key`` depend on the input and are 0.
    """
    axes = list(spec.axes)
    for name, _ in address.coordinates:
        # The first one: a matrix over streams has two axes of one name.
        axes.remove(COORDINATE_AXES[name])
    return tuple(facts.axis_size(axis, address.layer) for axis in axes)


def _known_name(name: str, specs: Mapping[str, PointSpec], address: Address) -> None:
    if name not in specs:
        raise AddressError(f"{address}: " + unknown_name("point", name, specs))


def _check(address: Address, specs: Mapping[str, PointSpec], facts: ModelFacts) -> None:
    if address.module_path is not None:
        return  # Whether the module exists is known only to a loaded model.
    _known_name(address.name, specs, address)
    spec = specs[address.name]
    _check_scope(address, spec, facts, ranged=False)
    _check_coordinates(address, spec, facts)


def _check_scope(address: Address, spec: PointSpec, facts: ModelFacts, *, ranged: bool) -> None:
    last = facts.n_layers - 1
    if spec.scope == "trunk":
        if ranged or address.layer is not None:
            raise AddressError(f"{address}: {spec.name} exists once per model and takes no layer; write {spec.name!r}")
        return
    if ranged:
        return
    if address.layer is None:
        raise AddressError(f"{address}: {spec.name} needs a layer from 0 to {last}, as in {spec.name}.{last}")
    if address.layer > last:
        raise AddressError(f"{address}: the layers of this model are 0 to {last}")


def _check_coordinates(address: Address, spec: PointSpec, facts: ModelFacts) -> None:
    for name, index in address.coordinates:
        axis = COORDINATE_AXES[name]
        if axis not in spec.axes:
            valid = sorted(c for c, a in COORDINATE_AXES.items() if a in spec.axes)
            allowed = f"its coordinates are {', '.join(valid)}" if valid else "it takes no coordinate"
            raise AddressError(f"{address}: {spec.name} has no {name} axis; {allowed}")
        size = facts.axis_size(axis, address.layer)
        if index >= size > 0:
            raise AddressError(f"{address}: {name} counts from 0 to {size - 1} at this layer")
