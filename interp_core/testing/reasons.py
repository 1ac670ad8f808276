"""The rule that every "no" comes with a reason and a way forward, on records and on a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from interp_core.collect import Collected
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.gradients import GradSupport
from interp_core.points import GENERAL_POINTS, PointSpec, PointSupport
from interp_core.residual import ResidualBasis

__all__ = ["made_up_facts", "of_basis", "of_gradients", "of_support", "unexplained"]


def unexplained(found: Collected) -> Iterator[str]:
    """Everything that records refuse without a reason."""
    for spec in found.backends:
        what = f"BackendSpec {spec.name!r}"
        yield from (f"{what}: {fault}" for fault in of_support(spec.points, GENERAL_POINTS))
        yield from (f"{what}: {fault}" for fault in _empty("lacks", spec.lacks))
        if spec.grad is not None:
            verdict = _tried(spec.grad, made_up_facts(1), {option.name: option.default for option in spec.options})
            yield from (f"{what}: {fault}" for fault in of_gradients(verdict))
    for architecture in found.architectures:
        what = f"Architecture {architecture.name!r}"
        known = {**GENERAL_POINTS, **{point.name: point for point in architecture.points}}
        for backend, table in architecture.support.items():
            yield from (f"{what} on {backend!r}: {fault}" for fault in of_support(table, known))
        yield from (f"{what}: {fault}" for fault in _empty("refused", architecture.refused))
        if architecture.residual_basis is not None:
            for streams in (1, 4):
                basis = _tried(architecture.residual_basis, made_up_facts(streams))
                yield from (f"{what}, with {streams} streams: {fault}" for fault in of_basis(basis))


def of_support(table: Mapping[str, PointSupport], known: Mapping[str, PointSpec]) -> Iterator[str]:
    """Points of a table that are not served, or not writable, for no given reason."""
    for name, support in table.items():
        if support.why.strip():
            continue
        if not support.readable:
            yield f"the point {name!r} is not served, and 'why' is empty"
        elif not support.writable and name in known and known[name].writable:
            yield f"the point {name!r} cannot be written, and 'why' is empty"


def of_basis(basis: ResidualBasis | None) -> Iterator[str]:
    """What a residual basis refuses without saying why, or what else."""
    if basis is None:
        return
    refuses = [name for name in ("additive", "lens_valid") if not getattr(basis, name)]
    if refuses and not any(blocker.strip() for blocker in basis.blockers):
        yield f"its residual basis is not {' or '.join(refuses)}, and 'blockers' is empty"
    if not basis.lens_valid and not basis.instead.strip():
        yield "its residual basis refuses the lens, and 'instead' is empty"


def of_gradients(verdict: GradSupport | None) -> Iterator[str]:
    """What a verdict on gradients refuses without saying why."""
    if verdict is not None and not verdict.through_forward and not any(b.strip() for b in verdict.blockers):
        yield "gradients do not flow, and 'blockers' is empty"


def made_up_facts(streams: int) -> ModelFacts:
    """Facts of a small trunk of no family, to ask a description's own functions with."""
    layers = [
        LayerFacts(index=i, n_heads=4, n_kv_heads=2, head_dim=8, v_head_dim=8, d_mlp=64, n_experts=4, top_k=2)
        for i in range(2)
    ]
    return ModelFacts(
        model_type="made_up",
        structure_known=True,
        n_layers=2,
        d_model=32,
        vocab_size=100,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        d_mlp=64,
        layers=layers,
        n_streams=streams,
    )


def _empty(field: str, table: Mapping[str, str]) -> Iterator[str]:
    for name, text in table.items():
        if not text.strip():
            yield f"{field}[{name!r}] is empty"


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer for made-up facts; ``None`` if it needs those of a real model, which the behaviour half has."""
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001 - facts of no family may be more than it was made for
        return None
