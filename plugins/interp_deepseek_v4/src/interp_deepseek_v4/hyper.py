"""Hyper-connections in transformers' module trees, as data: which module gives collapse, write and mix, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from interp_core.address import Address
from interp_core.errors import BackendUnavailable
from interp_core.expressions import Binding, Derived, Expression, Permute, Place, Read
from interp_core.facts import ModelFacts
from interp_core.trunk import Trunk

if TYPE_CHECKING:
    from torch import Tensor, nn

    from interp_core.layout import Layout

__all__ = ["Connection", "HyperTrunk", "identity_mix"]


@frozen(kw_only=True)
class Connection:
    """One hyper-connection of a block, a module whose output is a tuple.

    Attributes:
        module: its name in the block.
        collapse, write: slots of the output.
        mix: slot of the mixing matrix, ``[from, to]`` as modelling code keeps it; ``None`` if streams are not remixed.
    """

    module: str
    collapse: int
    write: int
    mix: int | None = None


@frozen(kw_only=True)
class HyperTrunk(Trunk):
    """A trunk of several streams: two hyper-connections per block and a contraction behind the last one.

    Attributes:
        attn, mlp: the connections.
        contraction: name of the trunk's module that makes one row of a stack.
        flat: whether stacks are kept as ``[..., streams * d_model]``.
        roles: further modules of a block by role, each with its path in the block; passed over where it is not there.
        points: further points by name.
    """

    attn: Connection
    mlp: Connection
    contraction: str
    flat: bool = False
    roles: Mapping[str, str] = field(factory=dict)
    points: Mapping[str, Expression] = field(factory=dict)

    def layout(self, model: Any, facts: ModelFacts) -> Layout:
        """The conventional parts, and the connections."""
        found = super().layout(model, facts)
        named = {"hyper.attn": self.attn.module, "hyper.mlp": self.mlp.module, **self.roles}
        for roles in found.blocks:
            block = roles["block"]
            for role, path in named.items():
                part = submodule(block, path)
                if part is not None:
                    roles[role] = part
        found.trunk["contraction"] = only_module(model, self.contraction)
        return found

    def bind(self, address: Address, facts: ModelFacts, layout: Layout) -> Binding:
        """Stream points, the block's own sublayers, then what is conventional."""
        if address.name in self.points:
            return Binding(self.points[address.name])
        site, _, part = address.name.partition("_stream_")
        if part:
            connection = self.attn if site == "attn" else self.mlp
            return Binding(_part(f"hyper.{site}", part, connection, facts.n_streams))
        sublayer = _SUBLAYERS.get(address.name)
        return Binding(sublayer) if sublayer is not None else super().bind(address, facts, layout)

    def contract(self, stack: Tensor, layout: Layout) -> Tensor:
        """Through the model's own module, which takes ``[batch, pos, streams, d_model]``."""
        rows = stack.flatten(-2) if self.flat else stack
        found: Tensor = layout.module("contraction", None)(rows[None])
        return found[0]


_SUBLAYERS: Mapping[str, Expression] = {
    "resid_streams": Read("block"),
    "resid_post": Read("block"),
    "resid_pre": Read("block", "input"),
    "resid_mid": Read("hyper.mlp", "input"),
    "attn_in": Read("attn", "input"),
    "attn_out": Read("attn"),
    "mlp_in": Read("mlp", "input"),
    "mlp_out": Read("mlp"),
}


def _part(role: str, part: str, connection: Connection, streams: int) -> Expression:
    if part == "collapse":
        return Read(role, slot=connection.collapse)
    if part == "write":
        return Read(role, slot=connection.write)
    if connection.mix is None:
        return Derived((Read(role, slot=connection.write),), identity_mix)
    # Modelling code sums over the matrix's first axis; a point's new = mix @ streams sums over its last.
    return Permute(Read(role, slot=connection.mix), (streams, streams), (1, 0))


def identity_mix(rows: Tensor, place: Place) -> Tensor:
    """Streams that are not remixed: the unit matrix, flat, for each row of weights ``[..., streams]``."""
    streams = rows.shape[-1]
    eye = torch.eye(streams, dtype=rows.dtype, device=rows.device).flatten()
    return eye.expand(*rows.shape[:-1], streams * streams)


def submodule(block: nn.Module, path: str) -> nn.Module | None:
    """A module by its path, or ``None`` where this block has it not."""
    found: Any = block
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, torch.nn.Module) else None


def only_module(model: nn.Module, name: str) -> nn.Module:
    """The one module of that name.

    Raises:
        BackendUnavailable: there is none, or more than one.
    """
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]
    if len(found) != 1:
        raise BackendUnavailable(f"this model has {len(found)} modules named {name!r}, where one is due")
    return found[0]
