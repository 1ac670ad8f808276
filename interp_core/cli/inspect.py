"""``interp describe``, ``points`` and ``capabilities``: questions answered from configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from interp_core.cli.console import out, print_json
from interp_core.cli.models import BackendName, Json, Options, load_options, resolve_model
from interp_core.description import describe_point

if TYPE_CHECKING:
    from interp_core.points import PointSpec
    from interp_core.profile import ModelProfile

__all__ = ["capabilities", "describe", "points", "show_profile"]

ModelOrFolder = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a hub id, or 'demo' for the embedded real model.")
]


def describe(
    model: ModelOrFolder, backend: BackendName = "auto", option: Options = None, as_json: Json = False
) -> None:
    """What a model is and can do, without loading a weight."""
    profile = _profile(model, backend, option)
    if as_json:
        print_json(profile.describe())
    else:
        show_profile(profile)


def points(model: ModelOrFolder, backend: BackendName = "auto", option: Options = None, as_json: Json = False) -> None:
    """Every point of a model, and how far each backend serves it."""
    profile = _profile(model, backend, option)
    named = backend if backend != "auto" else None
    if as_json:
        print_json([describe_point(spec, named) for spec in profile.points()])
        return
    backends = [named] if named else sorted(next(iter(profile.specs.values())).support)
    table = Table(title=f"{profile.model_id}: points", title_justify="left")
    table.add_column("point", no_wrap=True)
    table.add_column("axes", no_wrap=True)
    for name in backends:
        table.add_column(name)
    table.add_column("owner")
    for spec in profile.points():
        cells = [_support(spec, name) for name in backends]
        table.add_row(spec.name + ("" if spec.scope == "trunk" else ".N"), " × ".join(spec.axes), *cells, spec.owner)
    out.print(table)
    _show_reasons(profile)


def capabilities(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Ask for one model; without it, the table.")
    ] = None,
    backend: BackendName = "auto",
    option: Options = None,
    as_json: Json = False,
) -> None:
    """The table of capabilities; with MODEL, which of them it has, and what to call instead of the others."""
    from interp_core import CAPABILITIES

    if model is None:
        rows = [
            {"name": r.name, "what": r.what, "why": r.why, "instead": r.instead, "owner": r.owner}
            for r in CAPABILITIES.values()
        ]
        if as_json:
            print_json(rows)
            return
        table = Table(title="capabilities", title_justify="left")
        for heading in ("name", "what", "instead, where refused", "owner"):
            table.add_column(heading, no_wrap=heading == "name")
        for row in rows:
            table.add_row(row["name"], row["what"], row["instead"], row["owner"])
        out.print(table)
        return
    profile = _profile(model, backend, option)
    verdicts = profile.describe()["capabilities"]
    if as_json:
        print_json({"model": profile.model_id, "backend": profile.backend, "capabilities": verdicts})
        return
    table = Table(title=f"{profile.model_id} on {profile.backend}", title_justify="left")
    table.add_column("capability", no_wrap=True)
    table.add_column("")
    table.add_column("why not, and what instead")
    for name, verdict in verdicts.items():
        mark = "[green]yes[/green]" if verdict["supported"] else "[red]no[/red]"
        why = "" if verdict["supported"] else f"{verdict['why']} → {verdict['instead']}"
        table.add_row(name, mark, why)
    out.print(table)


def _profile(model: str, backend: str, option: list[str] | None) -> ModelProfile:
    from interp_core.loading import inspect_model

    return inspect_model(resolve_model(model), backend, **load_options(option))


def show_profile(profile: ModelProfile) -> None:
    """A profile for people."""
    facts = profile.facts
    owner = f" (described by {profile.architecture.owner})" if profile.architecture else ""
    head = Table(title=profile.model_id, title_justify="left", show_header=False)
    head.add_column(style="bold", no_wrap=True)
    head.add_column()
    attention = (
        f"{facts.n_heads} heads of {facts.head_dim}, {facts.n_kv_heads} key/value heads" if facts.n_heads else "none"
    )
    for name, value in (
        ("architecture", f"{facts.architecture or facts.model_type} ({profile.architecture_name}){owner}"),
        ("backend", f"{profile.backend}: {profile.spec.summary}"),
        ("blocks", f"{facts.n_layers} × d_model {facts.d_model}: {_kinds(profile)}"),
        ("attention", attention),
        ("MLP", _mlp(profile)),
        ("vocabulary", f"{facts.vocab_size:,} tokens; at most {facts.max_positions or 'any number of'} positions"),
        ("residual", profile.residual_basis.describe()["summary"]),
        ("gradients", profile.grad_support.describe()["summary"]),
    ):
        head.add_row(name, value)
    out.print(head)
    served = [s for s in profile.points() if profile.support(s.name).readable]
    absent = [s.name for s in profile.points() if not profile.support(s.name).readable]
    for owner in dict.fromkeys(s.owner for s in served):
        own = [s.name for s in served if s.owner == owner]
        out.print(f"[bold]points served[/bold], defined by {owner} ({len(own)}): {', '.join(own)}")
    if absent:
        out.print(f"[bold]not served[/bold] ({len(absent)}): {', '.join(absent)}   (interp points MODEL says why)")
    for name, reason in profile.passed_over.items():
        out.print(f"[dim]not chosen: {name}: {reason}[/dim]")


def _kinds(profile: ModelProfile) -> str:
    counts: dict[str, int] = {}
    for layer in profile.facts.layers:
        words = layer.mixer.replace("_", " ") + ("" if layer.mlp == "dense" else f" + {layer.mlp} MLP")
        words += f" (window {layer.window})" if layer.window else ""
        counts[words] = counts.get(words, 0) + 1
    return ", ".join(f"{n} × {words}" for words, n in counts.items())


def _mlp(profile: ModelProfile) -> str:
    facts = profile.facts
    kinds = []
    if facts.d_mlp:
        kinds.append(f"{facts.d_mlp} neurons, {'gated ' if facts.gated_mlp else ''}{facts.activation}")
    sparse = next((layer for layer in facts.layers if layer.mlp == "sparse"), None)
    if sparse is not None:
        kinds.append(f"{sparse.n_experts} experts, {sparse.top_k} per token")
    return "; ".join(kinds) or "none"


def _support(spec: PointSpec, backend: str) -> str:
    support = spec.support[backend]
    if not support.readable:
        return "[red]none[/red]"
    writes = ", write" if spec.writable and support.writable else ""
    partly = " (not at every layer)" if spec.absent else ""
    return f"[green]{support.mode}[/green]{writes}{partly}"


def _show_reasons(profile: ModelProfile) -> None:
    lines = []
    for spec in profile.points():
        for layer, why in spec.absent.items():
            lines.append(f"{spec.name}{'' if layer is None else f'.{layer}'}: {why}")
        support: Any = profile.support(spec.name)
        if not spec.absent and not support.readable and support.why:
            lines.append(f"{spec.name}: {support.why}")
    for line in lines[:40]:
        out.print(f"  {line}", markup=False)
    if len(lines) > 40:
        out.print(f"  ... and {len(lines) - 40} more: --json lists them all")
