"""Keywords of ``load_model``, described: what a backend or an architecture takes beyond the common ones."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = ["OptionSpec"]


@frozen(kw_only=True)
class OptionSpec:
    """One keyword of ``load_model`` that a backend, or a trunk on it, understands beyond the common ones.

    Attributes:
        name: the keyword.
        help: what it does, in one sentence.
        types: accepted Python types; ``None`` is accepted where it is the default.
        default: the value if it is not given.
        choices: the valid values, where they are few.
    """

    name: str
    help: str
    types: tuple[type, ...] = field(default=(object,), converter=as_tuple)
    default: Any = None
    choices: tuple[Any, ...] = field(default=(), converter=as_tuple)
