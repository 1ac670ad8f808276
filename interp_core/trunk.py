"""Where the tensors of a trunk are in an engine's module tree: what the bindings of an architecture provide.

A conventional decoder needs none of its own: its modules are found by structure. A plugin that describes another
trunk names an object with these methods under ``Architecture(bindings={"eager": "package.module:name"})``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from interp_core import bindings as conventional
from interp_core.address import Address
from interp_core.errors import BackendUnavailable
from interp_core.expressions import Binding, Expression
from interp_core.facts import ModelFacts
from interp_core.layout import Layout, find_layout
from interp_core.lazy import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.architecture import Architecture

__all__ = ["TableTrunk", "Trunk", "trunk_of"]


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


@frozen(kw_only=True)
class TableTrunk(Trunk):
    """A decoder with module names of its own, described by tables; what is not in them is as in any other decoder.

    Attributes:
        blocks: path of the list of blocks.
        trunk: path of each role of the trunk: ``embed``, ``final_norm``, ``lm_head``, or any that ``points`` use.
        roles: path within a block of each role of a block: ``attn``, ``attn.v_proj``, ``attn.o_proj``, ``attn.q_norm``,
            ``attn.k_norm``, ``attn_post_norm``, ``mlp``, ``mlp.gate_proj``, ``mlp.up_proj``, ``mlp.down_proj``,
            ``mlp_pre_norm``, ``mlp_post_norm``, or any that ``points`` use. A block without a module lacks its role.
        points: points of its own, and general ones that are elsewhere than in other decoders.
    """

    blocks: str
    trunk: Mapping[str, str]
    roles: Mapping[str, str]
    points: Mapping[str, Expression] = field(factory=dict)

    def layout(self, model: Any, facts: ModelFacts) -> Layout:
        """The modules at the paths of the tables.

        Raises:
            BackendUnavailable: the list of blocks, or a role of the trunk, is not where the tables say.
        """
        found = Layout({role: _at(model, path) for role, path in self.trunk.items()})
        blocks: Any = _at(model, self.blocks)
        if len(blocks) != facts.n_layers:
            raise BackendUnavailable(f"{self.blocks} of this model are {len(blocks)} blocks, not {facts.n_layers}")
        for block in blocks:
            parts = {role: _within(block, path) for role, path in self.roles.items()}
            found.blocks.append({"block": block, **{role: part for role, part in parts.items() if part is not None}})
        return found

    def bind(self, address: Address, facts: ModelFacts, layout: Layout) -> Binding:
        """What the tables say, or what is conventional."""
        own = self.points.get(address.name)
        return Binding(own) if own is not None else super().bind(address, facts, layout)


def _at(model: Any, path: str) -> Any:
    found = _within(model, path)
    if found is None:
        raise BackendUnavailable(f"this model has no module {path!r}, where its architecture says that there is one")
    return found


def _within(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


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
