"""``interp verify``: the identities on one's own checkpoint, as a table of points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from interp_core.cli.console import errors, out, print_json
from interp_core.cli.models import BackendName, Device, Dtype, Json, ModelName, Options, load
from interp_core.verdicts import ABSENT, FAILED, PROVEN, UNCHECKED, listed_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interp_core.profile import ModelProfile
    from interp_core.verdicts import Verdict, Verification

__all__ = ["verify"]

_COLOURS = {PROVEN: "green", ABSENT: "dim", FAILED: "bold red", UNCHECKED: "yellow"}


def verify(
    model: ModelName,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to run; a made-up row of tokens without.")
    ] = None,
    backend: BackendName = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Run the identities on a model: each point at each layer is proven, absent, failed or unchecked.

    Exit status 1 if something failed, or is served and stayed unchecked.
    """

    def check(profile: ModelProfile) -> None:
        profile.require("capture")

    with load(model, backend, dtype, device, option, check) as loaded:
        tokens = None if prompt is None else loaded.to_tokens(prompt)
        found = loaded.verify(tokens, progress=errors.is_terminal)
        if as_json:
            print_json({"model": loaded.model_id, "backend": loaded.backend, **found.describe()})
        else:
            out.print(_table(f"{loaded.model_id} on {loaded.backend}", found))
            _show(found)
    if not found.complete:
        raise typer.Exit(1)


def _table(title: str, found: Verification) -> Table:
    table = Table(title=escape(title), title_justify="left")
    table.add_column("point", no_wrap=True)
    for state in (PROVEN, ABSENT, FAILED, UNCHECKED):
        table.add_column(state)
    for heading in ("worst error", "control"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, verdicts in found.layers.items():
        shown = [verdict for verdict in verdicts.values() if verdict.state != ABSENT]
        worst = max((v.error for v in shown if v.error is not None), default=None)
        closest = min((v.control for v in shown if v.control is not None), default=None)
        cells = [_where(verdicts, state) for state in (PROVEN, ABSENT, FAILED, UNCHECKED)]
        table.add_row(name, *cells, _figure(worst), _figure(closest))
    return table


def _where(verdicts: Mapping[int | None, Verdict], state: str) -> str:
    found = [layer for layer, verdict in verdicts.items() if verdict.state == state]
    if not found:
        return ""
    layers = [layer for layer in found if layer is not None]
    words = "yes" if not layers else "all layers" if len(found) == len(verdicts) > 1 else listed_layers(layers)
    return f"[{_COLOURS[state]}]{words}[/]"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _show(found: Verification) -> None:
    """Reasons below the table, layers with the same one together; then what the numbers show, and the sum."""
    for state, reason_of in ((ABSENT, _reason), (UNCHECKED, _identities), (FAILED, _identities)):
        for name, verdicts in found.layers.items():
            groups: dict[str, list[int | None]] = {}
            for layer, verdict in verdicts.items():
                if verdict.state == state:
                    groups.setdefault(reason_of(verdict), []).append(layer)
            for reason, layers in groups.items():
                some = [layer for layer in layers if layer is not None and len(layers) < len(verdicts)]
                where = f" ({listed_layers(some)})" if some else ""
                out.print(f"{state}: {name}{where}: {reason}", style=_COLOURS[state], markup=False, soft_wrap=True)
    for hint in found.hints:
        out.print(f"hint: {hint}", style="cyan", markup=False, soft_wrap=True)
    out.print(found.summary)


def _reason(verdict: Verdict) -> str:
    return verdict.reason


def _identities(verdict: Verdict) -> str:
    """What decided it, without the numbers, which differ from layer to layer and are in the table."""
    return "; ".join(dict.fromkeys(check.identity for check in verdict.checks)) or verdict.reason
