"""Where the tensors of a trunk are in an engine's module tree: what the bindings of an architecture provide.

A conventional decoder needs none of its own: its modules are found by structure. A plugin that describes another
trunk names an object with these methods under ``Architecture(bindings={"eager": "package.module:name"})``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_core import bindings as conventional
from interp_core.address import Address
from interp_core.errors import BackendUnavailable
from interp_core.expressions import Binding
from interp_core.facts import ModelFacts
from interp_core.layout import find_layout
from interp_core.lazy import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.architecture import Architecture
    from interp_core.layout import Layout

__all__ = ["Trunk", "trunk_of"]


class Trunk:
    """A conventional decoder's bindings, and the base of any other's: override what is unusual.

    Methods get the model as the engine holds it, and run in the process that holds it.
    """

    def layout(self, model: Any, facts: ModelFacts) -> Layout:
        """The modules of ``model`` by role; roles may have any name that :meth:`bind` understands.

        Raises:
            BackendUnavailable: a part that the facts promise is not found.
        """
        return find_layout(model, facts)

    def bind(self, address: Address, facts: ModelFacts, layout: Layout) -> Binding:
        """Where a point lives. ``address`` has no coordinates.

        Raises:
            KeyError: the point has no binding; a profile refuses such points before.
        """
        return conventional.bind(address, facts, layout)

    def contract(self, stack: Tensor, layout: Layout) -> Tensor:
        """A stack of residual streams ``[rows, streams, d_model]`` as the model itself makes one row of it.

        Returns:
            ``[rows, d_model]``, what the final norm (or, without one, the unembedding) reads.
        """
        raise BackendUnavailable("this trunk has one residual stream, so it has no contraction")


def trunk_of(architecture: Architecture | None, backend: str) -> Trunk:
    """The bindings of an architecture on a backend; a conventional decoder's where none are needed.

    Raises:
        BackendUnavailable: the trunk is no conventional one, and its architecture does not bind it on this backend.
    """
    if architecture is None:
        return Trunk()
    if backend in architecture.bindings:
        found: Trunk = load_object(architecture.bindings[backend])
        return found
    if architecture.points or architecture.stream_points:
        raise BackendUnavailable(
            f"the architecture {architecture.name!r} (of {architecture.owner}) does not say where its tensors "
            f"are on backend {backend!r}, so it can be inspected and not run; it binds: "
            f"{', '.join(sorted(architecture.bindings)) or 'no backend'}"
        )
    return Trunk()
