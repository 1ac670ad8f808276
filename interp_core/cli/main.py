"""The application: commands joined, errors made into one readable line."""

from __future__ import annotations

import os
import sys
import traceback
import warnings

import typer

from interp_core.cli import demo, harvest, inspect, new_plugin, plugins, run, verify
from interp_core.cli.console import errors
from interp_core.errors import InterpError

__all__ = ["app", "main"]

app = typer.Typer(
    name="interp",
    help="Read and write the inside of transformer language models, by name, on any backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_STATE = {"verbose": False}


@app.callback()
def _options(
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    _STATE["verbose"] = verbose
    if version:
        from interp_core._version import __version__

        typer.echo(f"interp-core {__version__}")
        raise typer.Exit


app.add_typer(plugins.app, name="plugins")
app.command("describe")(inspect.describe)
app.command("points")(inspect.points)
app.command("capabilities")(inspect.capabilities)
app.command("lens")(run.lens)
app.command("capture")(run.capture)
app.command("harvest")(harvest.harvest)
app.command("verify")(verify.verify)
app.command("demo")(demo.demo)
app.command("new-plugin")(new_plugin.new_plugin)


def main() -> None:
    """Run the command line. Exit status 1 for a refusal or bad input, 2 for wrong usage."""
    # Plugins that do not load are listed by `interp plugins`; one line each is enough here.
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except InterpError as error:
        _fail(error)
    except KeyboardInterrupt:
        errors.print("[yellow]interrupted[/yellow]")
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone, as in `interp points MODEL | head`: that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _fail(error)


def _fail(error: BaseException) -> None:
    if _STATE["verbose"] or "-v" in sys.argv or "--verbose" in sys.argv:
        traceback.print_exception(error)
    errors.print(f"[bold red]error:[/bold red] {_escaped(str(error) or type(error).__name__)}", soft_wrap=True)
    sys.exit(1)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
