"""``interp harvest``: capture over a file of texts, to a folder of shards that a killed run continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from interp_core.cli.console import errors, out, print_json
from interp_core.cli.models import BackendName, Device, Dtype, Json, ModelName, Options, load
from interp_core.cli.run import Positions, numbers

if TYPE_CHECKING:
    from interp_core.harvest_reader import Harvest
    from interp_core.profile import ModelProfile

__all__ = ["harvest"]


def harvest(
    model: ModelName,
    texts: Annotated[
        Path, typer.Option("--texts", help="A file with one text a line; .jsonl: a text, a list of ids or a record.")
    ],
    points: Annotated[
        list[str], typer.Option("--points", help="Addresses, such as resid_post.* or z.3; commas, or once more.")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="The folder: new, empty, or of a run to continue.")],
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts of one forward.")] = 8,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=1, help="Cut texts after so many tokens; if not given, none."),
    ] = None,
    shard_size: Annotated[int | None, typer.Option("--shard-size", min=1, help="Texts of one file.")] = None,
    positions: Positions = None,
    kept: Annotated[str | None, typer.Option("--keep-dtype", help="Dtype on disk; the model's if not given.")] = None,
    column: Annotated[str, typer.Option("--column", help="Of records, the entry to take.")] = "text",
    resume: Annotated[bool, typer.Option(help="Continue what is in the folder.")] = True,
    backend: BackendName = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Capture points of every text of a file into a folder that interp_core.load_harvest reads."""
    from interp_core.harvest_texts import Source

    wanted = [name for given in points for name in given.split(",") if name]
    chosen = numbers("--positions", positions)
    Source.of(texts)

    def check(profile: ModelProfile) -> None:
        for address in profile.addresses(wanted):
            refused = profile.read_refusal(address)
            if refused is not None:
                raise refused

    with load(model, backend, dtype, device, option, check) as loaded:
        found = loaded.harvest(
            texts,
            wanted,
            out_dir,
            batch_size=batch_size,
            max_length=max_length,
            shard_size=shard_size,
            positions=chosen,
            dtype=kept,
            column=column,
            resume=resume,
            progress=errors.is_terminal,
        )
    if as_json:
        print_json(_record(found))
        return
    table = Table(title=escape(str(found.path)), title_justify="left")
    for heading in ("address", "rows", "axes", "dtype"):
        table.add_column(heading, no_wrap=True)
    for address, point in found.index.points.items():
        rows = "per text" if point["pairwise"] else str(found.n_rows)
        table.add_row(address, rows, escape(str(point["axes"])), point["dtype"])
    out.print(table)
    cut = f", {found.truncated} of them cut" if found.truncated else ""
    out.print(
        f"{len(found)} texts{cut}, {len(found.index.shards)} files, {found.index.total('bytes')} bytes", markup=False
    )


def _record(found: Harvest) -> dict[str, Any]:
    totals = {name: found.index.total(name) for name in ("texts", "tokens", "rows", "truncated", "bytes")}
    return {
        "folder": str(found.path),
        "complete": found.complete,
        **totals,
        "files": [shard.file for shard in found.index.shards],
        "points": dict(found.index.points),
    }
