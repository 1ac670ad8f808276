"""Plugins made of a few records, given to a host as objects."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

from interp_core.architecture import Architecture, Claim
from interp_core.backend import BackendSpec
from interp_core.capabilities import Capability
from interp_core.hookspecs import hookimpl
from interp_core.host import PluginHost, PluginRecord, PluginWarning
from interp_core.points import PointSpec

__all__ = [
    "CONFLICTS",
    "GOOD",
    "architecture",
    "backend",
    "boom",
    "host_of",
    "loaded",
    "plugin",
    "point",
    "record_of",
    "row",
]


def backend(name: str, **changes: Any) -> BackendSpec:
    return BackendSpec(**{"name": name, "summary": "A backend.", "factory": "nowhere.engine:Engine", **changes})


def architecture(name: str, *points: PointSpec, **changes: Any) -> Architecture:
    claim = Claim(model_types={name})
    return Architecture(**{"name": name, "summary": "A trunk.", "claim": claim, "points": points, **changes})


def point(name: str, *, axes: tuple[str, ...] = ("d_model",), scope: str = "layer", **changes: Any) -> PointSpec:
    return PointSpec(name=name, scope=scope, axes=axes, definition="A tensor.", **changes)


def row(name: str, **changes: Any) -> Capability:
    return Capability(**{"name": name, "what": "A thing.", "why": "No reason.", "instead": "nothing", **changes})


def plugin(
    *, backends: Any = None, architectures: Any = None, capabilities: Any = None, **functions: Callable[..., Any]
) -> types.ModuleType:
    """A plugin module with the given records, and with functions of the given names, all marked."""
    module = types.ModuleType("made_up")
    for kind, value in (("backends", backends), ("architectures", architectures), ("capabilities", capabilities)):
        if value is not None:
            functions.setdefault(f"interp_{kind}", lambda value=value: value)
    for name, function in functions.items():
        setattr(module, name, hookimpl(function))
    return module


def host_of(*plugins: tuple[str, Any], **environ: str) -> PluginHost:
    return PluginHost(discover=False, plugins=plugins, environ=environ)


def loaded(*plugins: tuple[str, Any], **environ: str) -> PluginHost:
    """A loaded host, its warnings left to tests that look at them."""
    host = host_of(*plugins, **environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        host.load()
    return host


def record_of(host: PluginHost, name: str) -> PluginRecord:
    (found,) = [record for record in host.records if record.name == name]
    return found


GOOD = ("good", plugin(backends=[backend("good")]))


def boom(*_: Any) -> Any:
    raise OSError("the disk\nis on fire")


CONFLICTS: dict[str, tuple[Any, Any, str]] = {
    "backend": (plugin(backends=[backend("x")]), plugin(backends=[backend("x"), backend("y")]), "backend name 'x'"),
    "architecture": (
        plugin(architectures=[architecture("x")]),
        plugin(architectures=[architecture("x")]),
        "architecture name 'x'",
    ),
    "capability": (plugin(capabilities=[row("x")]), plugin(capabilities=[row("x")]), "capability name 'x'"),
    "axes of a point": (
        plugin(architectures=[architecture("one", point("x"))]),
        plugin(architectures=[architecture("two", point("x", axes=("heads", "head_dim")))]),
        "point 'x' is defined with different meanings",
    ),
    "scope of a point": (
        plugin(architectures=[architecture("one", point("x"))]),
        plugin(architectures=[architecture("two", point("x", scope="trunk"))]),
        "point 'x' is defined with different meanings",
    ),
}
