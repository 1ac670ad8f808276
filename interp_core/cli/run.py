"""``interp lens`` and ``interp capture``: commands that load weights and run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from interp_core.cli.console import errors, out, print_json, working
from interp_core.cli.models import BackendName, Device, Dtype, Json, ModelName, Options, load
from interp_core.errors import RequestError
from interp_core.streams import read_reduction
from interp_core.tokens import read_layers

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile
    from interp_core.results import LensResult

__all__ = ["capture", "lens", "lens_tables"]

_LAYER_COLUMN: Final = 9

Positions = Annotated[str | None, typer.Option("--positions", help="'last', or positions such as 0,3,5 or 2:6.")]


def lens(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="Text to run.")],
    layers: Annotated[str | None, typer.Option("--layers", help="Layers such as 0,5,11 or 20:30.")] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Tokens per cell in --json and --html.")] = 5,
    positions: Positions = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a picture that opens in a browser.")] = None,
    reduction: Annotated[
        str | None,
        typer.Option("--reduction", help="Of several residual streams: head, mean, sum, or a stream's number."),
    ] = None,
    backend: BackendName = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """The logit lens: what each layer would say at each position, as a table of layers by positions."""
    _writable(html)
    wanted, chosen = numbers("--layers", layers), numbers("--positions", positions)
    if wanted == "last":
        raise RequestError("--layers takes numbers, such as 0,5,11 or 20:30")

    def check(profile: ModelProfile) -> None:
        read_reduction(reduction, profile)
        _layers(wanted, profile)

    with load(model, backend, dtype, device, option, check) as loaded:
        ids = loaded.to_tokens(prompt)
        result = loaded.logit_lens(
            ids,
            _layers(wanted, loaded.profile),
            top_k,
            positions=chosen,
            reduction=reduction,
            progress=errors.is_terminal,
        )
        if html is not None:
            from interp_core.cli.lens_html import lens_page

            html.write_text(lens_page(loaded, prompt, result), encoding="utf-8")
            errors.print(f"wrote {html}", markup=False)
        if as_json:
            print_json(_lens_record(loaded, prompt, result))
        else:
            for table in lens_tables(loaded, result, out.width):
                out.print(table)


def capture(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="Text to run.")],
    point: Annotated[
        list[str], typer.Argument(metavar="POINT...", help="Addresses, such as resid_post.* or z.3.head-4.")
    ],
    out_file: Annotated[Path, typer.Option("--out", help="The safetensors file to write.")],
    positions: Positions = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=0, help="Generate this many tokens too.")] = 0,
    backend: BackendName = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Run a prompt, and save points to a safetensors file that interp_core.Cache.load reads."""
    _writable(out_file)
    chosen = numbers("--positions", positions)
    if max_tokens and chosen is not None:
        raise RequestError("--positions selects prompt positions and does not go with --max-tokens")

    def check(profile: ModelProfile) -> None:
        for address in profile.addresses(point):
            refused = profile.read_refusal(address)
            if refused is not None:
                raise refused

    with load(model, backend, dtype, device, option, check) as loaded:
        ids = loaded.to_tokens(prompt)
        text = None
        with working("running"):
            if max_tokens:
                completion, cache = loaded.capture_generation(ids, point, max_tokens=max_tokens)
                text = completion.text
            else:
                cache = loaded.run_with_cache(ids, point, positions=chosen)
        cache.save(out_file)
        tensors = {str(a): (list(t.shape), str(t.dtype).removeprefix("torch.")) for a, t in cache.items()}
        record = {
            "file": str(out_file),
            "tokens": [list(row) for row in cache.tokens],
            "completion": text,
            "tensors": {a: {"shape": shape, "dtype": kind} for a, (shape, kind) in tensors.items()},
        }
    if as_json:
        print_json(record)
        return
    table = Table(title=f"{out_file}", title_justify="left")
    for heading in ("address", "shape", "dtype"):
        table.add_column(heading, no_wrap=True)
    for address, (shape, kind) in tensors.items():
        table.add_row(address, str(shape).replace("[", r"\["), kind)
    out.print(table)
    if text is not None:
        out.print(f"completion: {text!r}", markup=False)


def _layers(wanted: Any, profile: ModelProfile) -> list[int]:
    """``--layers`` as a list of layers that exist."""
    n_layers = profile.facts.n_layers
    chosen = read_layers(list(range(*wanted.indices(n_layers))) if isinstance(wanted, slice) else wanted, n_layers)
    profile.addresses([("resid_post", layer) for layer in chosen])
    return chosen


def lens_tables(model: InterpModel, result: LensResult, width: int) -> Iterator[Table]:
    """The most likely token and its probability, layers by positions, in as many tables as ``width`` asks for."""
    tokens = [_visible(t) for t in model.to_str_tokens(list(result.token_ids))]
    columns = [[_cell(model, result, i, j) for i in range(len(result.layers))] for j in range(len(result.positions))]
    sizes = [
        3 + max(len(tokens[p]), *(len(text) for text, _ in column))
        for p, column in zip(result.positions, columns, strict=True)
    ]
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and _LAYER_COLUMN + sum(sizes[start : end + 1]) <= width:
            end += 1
        table = Table(title="logit lens: the most likely next token, and its probability", title_justify="left")
        table.add_column("layer", justify="right", no_wrap=True)
        for position in result.positions[start:end]:
            table.add_column(tokens[position], no_wrap=True)
        for i, layer in reversed(list(enumerate(result.layers))):
            cells = (column[i] for column in columns[start:end])
            table.add_row(str(layer), *(f"[{style}]{text}[/]" if style else text for text, style in cells))
        yield table
        start = end


def _cell(model: InterpModel, result: LensResult, i: int, j: int) -> tuple[str, str]:
    """Text and style of one cell."""
    probability = float(result.top_probs[i, j, 0])
    word = _visible(model.to_str_tokens([int(result.top_ids[i, j, 0])])[0])
    style = "bold green" if probability > 0.5 else "green" if probability > 0.2 else ""
    return f"{word} {probability:.2f}", style or ("dim" if probability < 0.05 else "")


def numbers(option: str, text: str | None) -> Any:
    """``None``, ``"last"``, a list of numbers (``0,3,5``) or a slice (``2:6``).

    Raises:
        RequestError: it is none of these.
    """
    if text is None or text == "last":
        return text
    try:
        if ":" in text:
            parts = [int(part) if part else None for part in text.split(":")]
            return slice(*parts)
        return [int(part) for part in text.split(",")]
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"{option} takes 'last', numbers such as 0,3,5, or a range such as 2:6, not {text!r}"
        ) from error


def _writable(path: Path | None) -> None:
    """Refuse an output file that cannot be written before any work is done for it."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RequestError(
            f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'its folder does not exist'}"
        )


def _visible(token: str) -> str:
    """A token in a table cell: white space made visible, markup made harmless."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥")
    shown = ("·" + shown[1:]) if shown.startswith(" ") else shown
    return shown.replace("[", r"\[")


def _lens_record(model: InterpModel, prompt: str, result: LensResult) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "tokens": model.to_str_tokens(list(result.token_ids)),
        "token_ids": list(result.token_ids),
        "layers": list(result.layers),
        "positions": list(result.positions),
        "top": [
            [
                [
                    {"id": int(t), "token": model.to_str_tokens([int(t)])[0], "probability": float(p)}
                    for t, p in zip(ids, probs, strict=True)
                ]
                for ids, probs in zip(layer_ids, layer_probs, strict=True)
            ]
            for layer_ids, layer_probs in zip(result.top_ids, result.top_probs, strict=True)
        ],
    }
