"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

__all__ = ["errors", "out", "print_json", "working"]

_WIDTH = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else None

out = Console(width=_WIDTH or (None if Console().is_terminal else 120), highlight=False)
"""Tables and text. Without a terminal it is wide enough not to fold them."""

errors = Console(stderr=True, highlight=False)
"""Progress, warnings and errors."""


def print_json(value: Any) -> None:
    """One JSON document on standard output, for machines."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something long runs; nothing where that is not a terminal."""
    with errors.status(what):
        yield
