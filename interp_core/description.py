"""A profile as one JSON-able record: what ``model.describe()`` and ``interp describe --json`` give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_core.points import PointSpec

if TYPE_CHECKING:
    from interp_core.profile import ModelProfile

__all__ = ["describe_point", "describe_profile"]


def describe_profile(profile: ModelProfile) -> dict[str, Any]:
    """Everything that a profile says, with nothing but JSON types in it."""
    refused = {name: profile.refusal(name) for name in profile.capabilities}
    return {
        "model_id": profile.model_id,
        "backend": profile.backend,
        "backend_owner": profile.spec.owner,
        "architecture": profile.architecture_name,
        "architecture_owner": profile.architecture.owner if profile.architecture else "interp-core",
        "hooks_available": profile.spec.hooks,
        "graph_replay": profile.spec.graph_replay,
        "facts": profile.facts.describe(),
        "residual_basis": profile.residual_basis.describe(),
        "grad_support": profile.grad_support.describe(),
        "capabilities": {name: _verdict(error) for name, error in refused.items()},
        "points": [describe_point(spec, profile.backend) for spec in profile.points()],
        "static_points": [str(a) for a in profile.static_points],
        "static_writes": [str(a) for a in profile.static_writes],
        "static_bytes": profile.static_bytes,
        "options": {name: _plain(value) for name, value in profile.options.items()},
        "passed_over": dict(profile.passed_over),
    }


def describe_point(spec: PointSpec, backend: str | None = None) -> dict[str, Any]:
    """One point with its support on ``backend``, or on every registered one."""
    names = list(spec.support) if backend is None else [backend]
    return {
        "name": spec.name,
        "scope": spec.scope,
        "axes": list(spec.axes),
        "definition": spec.definition,
        "owner": spec.owner,
        "absent": {"all" if layer is None else str(layer): why for layer, why in spec.absent.items()},
        "support": {
            name: {
                "mode": spec.support[name].mode,
                "writable": spec.writable and spec.support[name].writable,
                "why": spec.support[name].why,
                "sharded": spec.support[name].sharded,
            }
            for name in names
            if name in spec.support
        },
    }


def _verdict(error: Exception | None) -> dict[str, Any]:
    if error is None:
        return {"supported": True}
    return {"supported": False, "why": getattr(error, "why", str(error)), "instead": getattr(error, "instead", "")}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
