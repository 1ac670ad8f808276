"""A caller that has gone away: long synchronous work asks whether anybody still waits for it."""

from __future__ import annotations

import threading
from contextvars import ContextVar

__all__ = ["CANCELLED", "Abandoned", "check_cancelled"]


class Abandoned(Exception):
    """Raised in a worker thread whose caller was cancelled."""


CANCELLED: ContextVar[threading.Event | None] = ContextVar("interp_cancelled", default=None)
"""Set by the awaitable twin for the time of one call; carried into the worker thread with the context."""


def check_cancelled() -> None:
    """End the work of a caller that was cancelled.

    Raises:
        Abandoned: nobody waits for the result any more.
    """
    event = CANCELLED.get()
    if event is not None and event.is_set():
        raise Abandoned
