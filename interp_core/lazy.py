"""Names of objects that are imported only when they are used: ``"package.module:name"``."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["load_object"]


def load_object(target: str) -> Any:
    """Import ``"package.module:name"`` and return the object.

    Raises:
        ValueError: the text is not of that form.
        ImportError: the module cannot be imported.
        AttributeError: the module has no such name.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{target!r} is not of the form 'package.module:name'")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
