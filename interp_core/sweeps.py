"""Sweeps: the same prompt run once per place, with something else put there, and a metric for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from interp_core.address import COORDINATE_AXES, Address
from interp_core.cache import Cache
from interp_core.converters import as_tuple
from interp_core.errors import RequestError, unknown_name
from interp_core.functions import readable_addresses, run_with_cache
from interp_core.logits import finished
from interp_core.metrics import Metric, read_metric
from interp_core.operations import Ablate, Operation, Replace
from interp_core.requests import ForwardRequest, Read
from interp_core.sampling import read_count
from interp_core.selection import axes_of, select
from interp_core.steering import Steering, active_steering, as_steering, writes_for
from interp_core.tokens import read_tokens, select_positions

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = ["Sweep", "sweep"]

_LOGITS: Final = Address("lm_head")


@frozen(kw_only=True, eq=False)
class Sweep:
    """A metric for each place.

    Attributes:
        addresses: where something was put, in order: the rows of ``values``.
        positions: at which positions, per column of ``values``.
        values: ``[addresses, positions]``, the metric of each run.
        plain: the metric without any of it.
        metric: what it is, for people.
    """

    addresses: tuple[Address, ...] = field(converter=as_tuple)
    positions: tuple[tuple[int, ...], ...] = field(converter=as_tuple)
    values: Tensor
    plain: float
    metric: str = ""

    @property
    def effects(self) -> Tensor:
        """``[addresses, positions]``: how much each run's metric differs from the plain one's."""
        return self.values - self.plain

    def by_head(self) -> Tensor:
        """``values`` as ``[layers, heads, positions]``, of a sweep over every head (or expert, ...) of each layer.

        Raises:
            RequestError: the addresses are no such grid.
        """
        layers = list(dict.fromkeys(a.layer for a in self.addresses))
        each = len(self.addresses) // max(len(layers), 1)
        grid = [a.layer for a in self.addresses] == [layer for layer in layers for _ in range(each)]
        if not grid or any(len(a.coordinates) != 1 for a in self.addresses):
            raise RequestError("by_head needs a sweep over one coordinate of each layer, such as each='head'")
        return self.values.reshape(len(layers), each, -1)


def sweep(
    model: InterpModel,
    tokens: Any,
    points: Sequence[Any],
    metric: Any,
    *,
    put: Any = "zero",
    each: str | None = None,
    positions: Any = None,
    together: bool = False,
    steering: Any = None,
    batch_size: int = 16,
    progress: bool = False,
) -> Sweep:
    """Run a prompt once per address and position with another value there: activation patching, and ablation.

    Args:
        model: any model that reads logits and writes the points.
        tokens: one prompt.
        points: addresses to write, ranges included: ``["resid_post.*"]``.
        metric: a token (id or text), a pair of tokens, or a callable from logits ``[pos, vocab]`` to one number.
        put: what is put there: ``"zero"``; a prompt of the same length, or the cache of one, whose own values go to
            the same positions (activation patching); a mapping from addresses to vectors, such as means over a data
            set (mean ablation); or a callable from an address to the :class:`Operation` to do there.
        each: a coordinate to run through, such as ``"head"``: every head of every layer.
        positions: absolute positions, a slice, or ``"last"``: each is a run of its own; ``None`` for all of them.
        together: write all of the positions in one run instead.
        steering: operations for all runs, before what is put.
        batch_size: runs that go to the backend at once.
        progress: show a bar on standard error.

    Raises:
        AddressError, CapabilityUnsupported: a point does not exist or cannot be written, or logits cannot be read.
        RequestError: more than one prompt, a source of another length, or nothing to do.
    """
    judge = read_metric(model, metric)
    readable_addresses(model, [_LOGITS])
    batch = read_tokens(tokens, model.facts)
    if not batch.single:
        raise RequestError("sweep takes one prompt; call it once per prompt")
    ids, size = batch.rows[0], read_count("batch_size", batch_size)
    chosen = select_positions(positions, len(ids))
    chosen = tuple(range(len(ids))) if chosen is None else chosen
    if not chosen:
        raise RequestError(f"positions={positions!r} select nothing of this prompt of {len(ids)} tokens")
    places = (chosen,) if together else tuple((p,) for p in chosen)
    addresses = _every(model, points, each)
    before = [*active_steering(model), *([] if steering is None else [as_steering(model.profile, steering)])]
    make = _source(model, put, addresses, ids, steering)
    runs = [
        (*before, as_steering(model.profile, make(address, place), positions=place, generated=False))
        for address in addresses
        for place in places
    ]
    plain, *values = _judged(model, judge, ids, [tuple(before), *runs], size, progress)
    import torch

    return Sweep(
        addresses=addresses,
        positions=places,
        values=torch.tensor(values).reshape(len(addresses), len(places)),
        plain=plain,
        metric=judge.name,
    )


def _every(model: InterpModel, points: Sequence[Any], each: str | None) -> tuple[Address, ...]:
    """Addresses to write, one per value of the coordinate ``each`` where that is given."""
    addresses = model.profile.addresses(points)
    if each is not None:
        if each not in COORDINATE_AXES:
            raise RequestError(unknown_name("coordinate", each, COORDINATE_AXES))
        addresses = tuple(
            evolve(a, coordinates=(*a.coordinates, (each, number)))
            for a in addresses
            for number in range(_size(model, a, each))
        )
    if not addresses:
        raise RequestError("a sweep over no points: name some")
    for address in addresses:
        model.profile.address(address)
        refused = model.profile.write_refusal(address)
        if refused is not None:
            raise refused
    return addresses


def _size(model: InterpModel, address: Address, each: str) -> int:
    spec = model.profile.specs[address.name]
    if COORDINATE_AXES[each] not in spec.axes:
        raise RequestError(f"{address} has no {each}: its axes are {', '.join(spec.axes)}")
    return model.facts.axis_size(COORDINATE_AXES[each], address.layer)


def _vector(model: InterpModel, address: Address, vectors: Mapping[Address, Any]) -> Any:
    """The vector of an address, or its part of the whole point's, ``[*axes]``."""
    if address in vectors:
        return vectors[address]
    import torch

    whole = torch.as_tensor(vectors[address.bare()])
    axes, coordinates = axes_of(model.profile, address)
    if list(whole.shape) not in (list(axes), [math.prod(axes)]):
        raise RequestError(f"put holds {list(whole.shape)} for {address.bare()}, whose axes are {list(axes)}")
    return select(whole.reshape(-1), axes, coordinates)


_Make = Callable[[Address, tuple[int, ...]], Operation]


def _source(model: InterpModel, put: Any, addresses: Sequence[Address], ids: Sequence[int], steering: Any) -> _Make:
    """What makes the operation for an address and positions.

    Raises:
        RequestError: ``put`` is none of what a sweep takes, or of another length.
    """
    if isinstance(put, str):
        if put != "zero":
            raise RequestError(unknown_name("put", put, ["zero"]))
        return lambda address, _: Ablate(address)
    if callable(put):
        return lambda address, _: put(address)
    if isinstance(put, Mapping) and not isinstance(put, Cache):
        vectors = {model.profile.address(key): vector for key, vector in put.items()}
        missing = [str(a) for a in addresses if a not in vectors and a.bare() not in vectors]
        if missing:
            raise RequestError(f"put holds no vector for {', '.join(missing[:4])}")
        return lambda address, _: Replace(address, _vector(model, address, vectors))
    if getattr(getattr(put, "dtype", None), "is_floating_point", False):
        raise RequestError("a vector is put as the value of its point's address: put={'z.20': vector}")
    cache = put if isinstance(put, Cache) else run_with_cache(model, put, addresses, steering=steering)
    if cache.lengths != (len(ids),) or cache.positions is not None:
        raise RequestError(
            f"the source has prompts of {list(cache.lengths)} tokens, and this one {len(ids)}: one prompt of the same "
            "length, at all positions, is put in place of it"
        )
    absent = [str(a) for a in addresses if a not in cache]
    if absent:
        raise RequestError(f"the source holds no {', '.join(absent[:4])}: capture it there too")
    first = cache.offsets[0]
    return lambda address, place: Replace(address, cache[address][0, [first + p for p in place]])


def _judged(
    model: InterpModel,
    judge: Metric,
    ids: tuple[int, ...],
    runs: Iterable[tuple[Steering, ...]],
    size: int,
    progress: bool,
) -> list[float]:
    from tqdm.auto import tqdm

    wanted = (len(ids) - 1,) if judge.last_only else None
    requests = [
        ForwardRequest(
            token_ids=ids, reads=(Read(address=_LOGITS, positions=wanted),), writes=writes_for(run, len(ids))
        )
        for run in runs
    ]
    values: list[float] = []
    with tqdm(total=len(requests), desc="sweep", unit="run", disable=not progress, leave=False) as bar:
        for start in range(0, len(requests), size):
            some = requests[start : start + size]
            for result in model.session.run(some):
                values.append(float(judge(finished(result.rows[_LOGITS].float(), model.facts))))
            bar.update(len(some))
    return values
