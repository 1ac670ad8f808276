"""``interp plugins``: what is installed, from metadata alone unless asked to check; and ``interp plugins verify``."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import attrs
import typer
from rich.markup import escape
from rich.table import Table

from interp_core._version import __version__
from interp_core.cli.console import out, print_json, working
from interp_core.cli.models import Json
from interp_core.discovery import one_line

__all__ = ["app", "plugins", "verify"]

app = typer.Typer(invoke_without_command=True)
_COLOURS = {"active": "green", "enabled": "green", "blocked": "yellow"}


@app.callback()
def plugins(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Import them too; exit 1 unless every enabled one is active.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List installed plugins. Works when every one of them is broken: nothing is imported without --check."""
    if context.invoked_subcommand is not None:
        return
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


@app.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An installed plugin, or its distribution.")],
    as_json: Json = False,
) -> None:
    """Check one installed plugin against the static rules of the conformance kit; exit 1 unless it keeps all."""
    from interp_core.testing.findings import RULES
    from interp_core.testing.static import check_plugin

    with working(f"checking {name}"):
        findings = check_plugin(name)
    kept = all(finding.ok for finding in findings)
    if as_json:
        rows = [{**attrs.asdict(finding), "means": RULES[finding.rule]} for finding in findings]
        print_json({"core": __version__, "plugin": name, "ok": kept, "findings": rows})
    else:
        table = Table(title=f"{name}, with interp-core {__version__}", title_justify="left")
        for heading in ("rule", "", "what it asks, or what is wrong"):
            table.add_column(heading, no_wrap=heading == "rule")
        for finding in findings:
            verdict = "[green]ok[/green]" if finding.ok else "[red]broken[/red]"
            table.add_row(finding.rule, verdict, escape(finding.message or RULES[finding.rule]))
        out.print(table)
    if not kept:
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
