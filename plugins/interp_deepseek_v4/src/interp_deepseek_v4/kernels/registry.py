"""How a reference kernel becomes the op of `torch.ops._C` that vLLM's model code calls.

The kernels are registered as true ops and not set as attributes, so that a traced forward sees one opaque call
with a schema, as it does for the compiled op.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs
import torch

NAMESPACE: Final = "_C"

# An op lives as long as the library object that defines it.
_LIBRARIES: Final[list[torch.library.Library]] = []
_REGISTERED: Final[set[str]] = set()


@attrs.frozen
class Kernel:
    """One op: `mutates` are the arguments that it writes to, and its name is the function's, or `op`."""

    function: Callable[..., Any]
    mutates: tuple[str, ...] = ()
    op: str = ""

    @property
    def name(self) -> str:
        """The op's name below `torch.ops._C`."""
        return self.op or self.function.__name__


def compiled(name: str) -> bool:
    """Whether this build of vLLM has the op itself, whatever was registered here."""
    return name not in _REGISTERED and hasattr(getattr(torch.ops, NAMESPACE), name)


def register(kernels: Iterable[Kernel], *, replace: bool = False) -> None:
    """Define those of the ops that do not exist; with ``replace``, put the others in the place of compiled ones."""
    for kernel in kernels:
        if kernel.name in _REGISTERED:
            continue
        if compiled(kernel.name):
            if replace:
                _override(kernel)
            continue
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        schema = torch.library.infer_schema(kernel.function, mutates_args=kernel.mutates)
        library.define(kernel.name + schema)
        library.impl(kernel.name, kernel.function, "CPU")
        if not kernel.mutates:
            # Plain torch arithmetic says the shapes of its own results when it is run on fake tensors.
            torch.library.register_fake(f"{NAMESPACE}::{kernel.name}", kernel.function, lib=library)
        _LIBRARIES.append(library)
        _REGISTERED.add(kernel.name)


def _override(kernel: Kernel) -> None:
    """Put a reference kernel in the place of a compiled one of the same schema, for tensors on a CPU."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        # torch warns of what is meant here: that an op has a second implementation.
        warnings.simplefilter("ignore")
        library.impl(kernel.name, kernel.function, "CPU", allow_override=True)
    _LIBRARIES.append(library)
    _REGISTERED.add(kernel.name)
