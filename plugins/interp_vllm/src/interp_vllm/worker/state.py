"""What the worker holds of one request: what it asked for, what came so far, and whether something failed."""

from __future__ import annotations

from attrs import define, field
from torch import Tensor

from interp_core.address import Address
from interp_core.expressions import Expression, Read
from interp_core.requests import Write
from interp_vllm.wire import WorkerRequest
from interp_vllm.worker.rows import PositionedRows
from interp_vllm.worker.shards import Shard
from interp_vllm.worker.tables import ProgramTable

__all__ = ["AttentionRows", "PlacedProgram", "ReadJob", "RequestState", "SiteKey", "Work", "WriteJob"]

SiteKey = tuple[int, str]
"""Module identity and side."""


@define(eq=False)
class ReadJob:
    """An address whose rows are taken at a site."""

    address: Address
    expression: Expression
    axes: tuple[int, ...]
    coordinates: tuple[tuple[int, int], ...]
    store: PositionedRows


@define(eq=False)
class WriteJob:
    """Writes to one point, whatever their coordinates, in order."""

    expression: Expression
    axes: tuple[int, ...]
    items: list[tuple[Write, tuple[tuple[int, int], ...]]]


@define(eq=False)
class Work:
    """What one request has to do at one site, in this order.

    Writes of points that live here come first, then reads, then writes that this tensor only carries for the
    sake of a sum, so that a read of a contribution never shows what was added for the sum.
    """

    layer: int | None
    kept: list[Read] = field(factory=list)
    direct: list[WriteJob] = field(factory=list)
    reads: list[ReadJob] = field(factory=list)
    carried: list[WriteJob] = field(factory=list)
    attention: AttentionRows | None = None


@define(eq=False)
class AttentionRows:
    """Queries and keys of one layer, after the rotation, and how ranks split them."""

    query_shard: Shard | None
    key_shard: Shard | None
    queries: PositionedRows = field(factory=PositionedRows)
    keys: PositionedRows = field(factory=PositionedRows)


@define(eq=False)
class PlacedProgram:
    """A write of a compiled forward: the site's table, and where in it the write's vectors are.

    Attributes:
        table: the site's.
        write: what is written where.
        slots: rows of the bank per vector; several for a value per row.
        numbers: of the program.
    """

    table: ProgramTable
    write: Write
    slots: dict[str, list[int]]
    numbers: tuple[float, ...]


@define(eq=False)
class RequestState:
    """One request."""

    request: WorkerRequest
    work: dict[SiteKey, Work] = field(factory=dict)
    stores: dict[Address, PositionedRows] = field(factory=dict)
    attention: dict[int, AttentionRows] = field(factory=dict)
    kept: dict[tuple[SiteKey, int], Tensor] = field(factory=dict)
    programs: list[PlacedProgram] = field(factory=list)
    error: str | None = None
    seen: int = 0

    @property
    def nbytes(self) -> int:
        """Memory held."""
        stores = [*self.stores.values(), *(s for a in self.attention.values() for s in (a.queries, a.keys))]
        return sum(store.nbytes for store in stores)
