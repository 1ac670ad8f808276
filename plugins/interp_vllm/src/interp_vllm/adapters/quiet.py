"""vLLM's log where it does not mix with a command's answer, for as long as an engine is made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["quiet"]

_DEFAULTS: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Its own default is standard output.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


@contextmanager
def quiet() -> Iterator[None]:
    """vLLM and its children log errors only, to standard error, unless the user said otherwise."""
    ours = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
