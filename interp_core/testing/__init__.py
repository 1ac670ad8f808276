"""The conformance kit: how an author proves a plugin. It needs pytest; ``check_plugin`` does not.

The static half is :func:`check_plugin` (and ``interp plugins verify NAME``); the behaviour half are the pytest
suites :class:`BackendConformance` and :class:`ArchitectureConformance`, to be subclassed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from interp_core.checks import Check as Check
    from interp_core.checks import difference as difference
    from interp_core.testing.findings import RULES as RULES
    from interp_core.testing.findings import Finding as Finding
    from interp_core.testing.static import check_plugin as check_plugin
    from interp_core.testing.suites import ArchitectureConformance as ArchitectureConformance
    from interp_core.testing.suites import BackendConformance as BackendConformance
    from interp_core.testing.tiny import write_checkpoint as write_checkpoint

_HOMES: Final = {
    "ArchitectureConformance": "interp_core.testing.suites",
    "BackendConformance": "interp_core.testing.suites",
    "Check": "interp_core.checks",
    "Finding": "interp_core.testing.findings",
    "RULES": "interp_core.testing.findings",
    "check_plugin": "interp_core.testing.static",
    "difference": "interp_core.checks",
    "write_checkpoint": "interp_core.testing.tiny",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the table above is the list


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
