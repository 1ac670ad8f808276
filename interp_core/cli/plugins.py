"""``interp plugins``: what is installed, from metadata alone unless asked to check."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import attrs
import typer
from rich.markup import escape
from rich.table import Table

from interp_core._version import __version__
from interp_core.cli.console import out, print_json
from interp_core.cli.models import Json
from interp_core.discovery import one_line

__all__ = ["plugins"]

_COLOURS = {"active": "green", "enabled": "green", "blocked": "yellow"}


def plugins(
    check: Annotated[
        bool, typer.Option("--check", help="Import them too; exit 1 unless every enabled one is active.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List installed plugins. Works when every one of them is broken: nothing is imported without --check."""
    from interp_core.host import default_host, list_plugins

    if check:
        with warnings.catch_warnings():
            # Every reason is in the table below; a warning for each would say it twice.
            warnings.simplefilter("ignore")
            records = default_host().records
    else:
        records = list_plugins()
    rows = [_row(record) for record in records]
    if as_json:
        print_json({"core": __version__, "plugins": rows})
    else:
        _show(rows, check)
    if check and any(row["status"] not in ("active", "blocked") for row in rows):
        raise typer.Exit(1)


def _row(record: Any) -> dict[str, Any]:
    row = attrs.asdict(record, recurse=False)
    error = row.pop("error", None)
    row["error"] = None if error is None else one_line(error)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items()}


def _show(rows: list[dict[str, Any]], checked: bool) -> None:
    if not rows:
        out.print("no plugins are installed: pip install interp-eager (transformers) or interp-vllm (vLLM)")
        return
    table = Table(title=f"interp-core {__version__}", title_justify="left")
    for heading in ("plugin", "distribution", "version", "needs core", "status"):
        table.add_column(heading, no_wrap=True)
    table.add_column("brings" if checked else "entry point")
    for row in rows:
        brings = ", ".join([*row["backends"], *row["architectures"]]) if checked else row["value"]
        colour = _COLOURS.get(row["status"], "red")
        table.add_row(
            *(escape(row[key]) for key in ("name", "distribution", "version")),
            escape(row["requires_core"] or "any"),
            f"[{colour}]{row['status']}[/{colour}]",
            escape(brings),
        )
    out.print(table)
    for row in rows:
        if row["reason"] and row["status"] not in ("active", "enabled"):
            out.print(f"{row['name']} ({row['distribution']} {row['version']}): {row['reason']}", markup=False)
