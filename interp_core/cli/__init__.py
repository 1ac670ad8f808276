"""The command line, ``interp``. Everything it does is a call of the public functions."""

from __future__ import annotations

from interp_core.cli.main import main

__all__ = ["main"]
