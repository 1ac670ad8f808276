"""Calls into a plugin's own functions after loading: what they raise names their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from interp_core.errors import InterpError, PluginUnavailable

__all__ = ["call_plugin"]

T = TypeVar("T")


def call_plugin(what: str, owner: str, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, a function that a plugin registered.

    Args:
        what: what was asked of it, for the message.
        owner: the distribution that registered it.
        function: the plugin's function.
        *arguments: what it is called with.

    Raises:
        PluginUnavailable: it raised anything but an error of this family; that is the cause.
    """
    try:
        return function(*arguments)
    except InterpError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise PluginUnavailable(f"{owner}: {what} failed: {type(error).__name__}: {text}") from error
