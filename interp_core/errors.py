"""The one family of errors that this project raises on purpose.

Every message says what was asked, why it cannot be had, and what to call instead. Each class also
subclasses the built-in that a caller would catch without knowing this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AddressError",
    "BackendUnavailable",
    "CapabilityUnsupported",
    "InterpError",
    "ModelUnavailable",
    "PluginConflict",
    "PluginUnavailable",
    "RequestError",
    "nearest",
    "unknown_name",
]


class InterpError(Exception):
    """Base of every error that this project raises on purpose."""


class AddressError(InterpError, ValueError):
    """A point, layer or coordinate that does not exist, with what is valid in its place."""


class RequestError(InterpError, ValueError):
    """A request with bad input: tokens, positions, vectors, options or keywords."""


class ModelUnavailable(InterpError, ValueError):
    """A checkpoint or configuration that is missing, corrupt, or not a decoder that we know."""


class BackendUnavailable(InterpError, RuntimeError):
    """A backend that is not installed, or cannot run here; the message names what is missing."""


class PluginUnavailable(InterpError, RuntimeError):
    """A plugin that is installed but broken or switched off; its own failure is the ``__cause__``."""


class PluginConflict(InterpError, ValueError):
    """Two owners of one name. The message names both distributions and the way out."""


class CapabilityUnsupported(InterpError, ValueError):
    """What this model, on this backend, cannot do: refused before any work is done.

    Attributes:
        capability: name of the row of ``CAPABILITIES`` that refuses.
        why: the mechanical reason.
        instead: what to call instead.
        backend: the backend that was asked, or ``None`` if no backend can.
        architecture: the architecture that was asked, where that is the reason.
        point: the point's name, where one was named.
        layer: the layer, where one was named.
        owner: the distribution whose table refuses.
    """

    def __init__(
        self,
        *,
        capability: str,
        why: str,
        instead: str,
        backend: str | None = None,
        architecture: str | None = None,
        point: str | None = None,
        layer: int | None = None,
        owner: str = "interp-core",
    ) -> None:
        self.capability = capability
        self.why = why
        self.instead = instead
        self.backend = backend
        self.architecture = architecture
        self.point = point
        self.layer = layer
        self.owner = owner
        super().__init__(self._message())

    def _message(self) -> str:
        subject = self.capability
        if self.point is not None:
            subject = self.point if self.layer is None else f"{self.point}.{self.layer}"
        place = [part for part in (self.backend, self.architecture) if part]
        where = f" on {', '.join(place)}" if place else ""
        return f"{subject} is not supported{where}: {_sentence(self.why)} Instead: {_sentence(self.instead)}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by positional arguments, of which this one has none.
        fields = ("capability", "why", "instead", "backend", "architecture", "point", "layer", "owner")
        return _rebuild, (type(self), {name: getattr(self, name) for name in fields})


def _rebuild(cls: type[CapabilityUnsupported], fields: dict[str, Any]) -> CapabilityUnsupported:
    return cls(**fields)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a misspelt ``name`` most likely meant, or ``None``."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_name(kind: str, name: str, candidates: Iterable[str]) -> str:
    """One sentence for a name that is not known: the likely one, and the valid ones."""
    valid = sorted(set(candidates))
    guess = nearest(name, valid)
    hint = f" Did you mean {guess!r}?" if guess else ""
    listed = ", ".join(valid) if valid else "none"
    return f"unknown {kind} {name!r}.{hint} Valid: {listed}."
