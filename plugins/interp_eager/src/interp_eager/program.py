"""From validated requests to work at module sites: which tensors to change and read, where, in what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from attrs import define, field, frozen
from torch import nn

from interp_core.address import Address
from interp_core.expressions import Binding, Expression, Read, leaves
from interp_core.layout import Layout
from interp_core.profile import ModelProfile
from interp_core.requests import ForwardRequest, Write
from interp_core.selection import axes_of
from interp_eager.collect import Want

__all__ = [
    "ATTENTION_POINTS",
    "Program",
    "ReadJob",
    "Site",
    "SiteKey",
    "WriteJob",
    "compile_program",
]

ATTENTION_POINTS = frozenset({"attn_scores", "attn_probs"})

SiteKey = tuple[int, str, int, int | None]
"""Module identity, side, slot, and which of its calls."""


@frozen(eq=False)
class ReadJob:
    """One address to read when its last site is reached."""

    address: Address
    expression: Expression
    axes: tuple[int, ...]
    coordinates: tuple[tuple[int, int], ...]
    wants: tuple[Want, ...]

    @property
    def in_graph(self) -> bool:
        """Whether what is read stays a point of the autograd graph."""
        return not any(want.detach for want in self.wants)


@frozen(eq=False)
class WriteJob:
    """All writes to one point (whatever their coordinates), in order, each with its batch row."""

    expression: Expression
    axes: tuple[int, ...]
    items: tuple[tuple[int, Write, tuple[tuple[int, int], ...]], ...]


@define(eq=False)
class Site:
    """Everything to be done at one side of one module, in this order.

    Writes of points that live here come first, then reads, then writes that are only carried by this
    tensor for the sake of a sum: so a read of a contribution never shows what was added for ``resid_mid``. Sums
    that are read in the autograd graph come last.
    """

    module: nn.Module
    leaf: Read
    kept: bool = False
    direct: list[WriteJob] = field(factory=list)
    reads: list[ReadJob] = field(factory=list)
    carried: list[WriteJob] = field(factory=list)
    sums: list[ReadJob] = field(factory=list)

    @cached_property
    def key(self) -> SiteKey:
        """What identifies the site."""
        return _key(self.module, self.leaf)

    @cached_property
    def only_read(self) -> ReadJob | None:
        """The one thing to be done here, where that is to keep the whole tensor of the module, axes as they are."""
        if self.kept or self.direct or self.carried or self.sums or len(self.reads) != 1:
            return None
        (job,), leaf = self.reads, self.leaf
        plain = leaf.call is None and not (leaf.heads_first or leaf.streams_first or leaf.role.startswith("path."))
        whole = all(want.positions is None and want.detach and not want.keep_on_device for want in job.wants)
        return job if plain and whole and isinstance(job.expression, Read) and not job.coordinates else None


@define(eq=False)
class Program:
    """Sites with work, attention matrices wanted per layer, and how far the forward must go."""

    layout: Layout
    sites: dict[SiteKey, Site] = field(factory=dict)
    attention: dict[int, list[ReadJob]] = field(factory=dict)
    attention_writes: dict[int, list[tuple[int, Write]]] = field(factory=dict)
    last_layer: int = -1
    past_blocks: bool = False

    @property
    def at_head(self) -> bool:
        """Whether there is work at the unembedding, which then has to see every position."""
        head = self.layout.trunk.get("lm_head")
        return any(site.module is head for site in self.sites.values())

    def site(self, leaf: Read, layer: int | None) -> Site:
        """The site of a leaf, made if it is new."""
        module = self._module(leaf, layer)
        site = self.sites.setdefault(_key(module, leaf), Site(module, leaf))
        if site.leaf.role.startswith("path."):
            # A point knows the order of the axes, and a path does not.
            site.leaf = leaf
        return site

    def key(self, leaf: Read, layer: int | None) -> SiteKey:
        """The key of a leaf's site."""
        return _key(self._module(leaf, layer), leaf)

    def _module(self, leaf: Read, layer: int | None) -> nn.Module:
        return self.layout.module(leaf.role, None if leaf.role in self.layout.trunk else layer)


def _key(module: nn.Module, leaf: Read) -> SiteKey:
    return id(module), leaf.side, leaf.slot, leaf.call


def compile_program(
    requests: Sequence[ForwardRequest],
    profile: ModelProfile,
    layout: Layout,
    bind: Callable[[Address], Binding],
) -> Program:
    """Work for one batch of requests; batch row ``i`` is ``requests[i]``."""
    program = Program(layout)
    for address, wants in _reads(requests).items():
        _add_read(program, address, wants, profile, bind)
    for address, items in _writes(requests).items():
        _add_write(program, address, items, profile, bind)
    return program


def _reads(requests: Sequence[ForwardRequest]) -> dict[Address, list[Want]]:
    found: dict[Address, list[Want]] = {}
    for row, request in enumerate(requests):
        for read in request.reads:
            want = Want(row, read.positions, request.detach, request.keep_on_device)
            found.setdefault(read.address, []).append(want)
    return found


def _writes(requests: Sequence[ForwardRequest]) -> dict[Address, list[tuple[int, Write]]]:
    found: dict[Address, list[tuple[int, Write]]] = {}
    for row, request in enumerate(requests):
        for write in request.writes:
            found.setdefault(write.address.bare(), []).append((row, write))
    return found


def _add_read(
    program: Program, address: Address, wants: list[Want], profile: ModelProfile, bind: Callable[[Address], Binding]
) -> None:
    if address.module_path is not None:
        leaf = Read(address.name)
        program.site(leaf, None).reads.append(ReadJob(address, leaf, (), (), tuple(wants)))
        program.past_blocks = True
        return
    axes, coordinates = axes_of(profile, address)
    if address.layer is None:
        program.past_blocks = program.past_blocks or address.name != "embeddings"
    else:
        program.last_layer = max(program.last_layer, address.layer)
    if address.name in ATTENTION_POINTS:
        assert address.layer is not None
        job = ReadJob(address, Read("attn"), axes, coordinates, tuple(wants))
        program.attention.setdefault(address.layer, []).append(job)
        return
    binding = bind(address.bare())
    in_graph = not any(want.detach for want in wants)
    # To differentiate by a point is to ask what a write there would change, so it is read where it is written.
    expression = binding.writes_through if in_graph else binding.read
    job = ReadJob(address, expression, axes, coordinates, tuple(wants))
    site = _last_site(program, expression, address.layer)
    (site.sums if in_graph and binding.write is not None else site.reads).append(job)


def _add_write(
    program: Program,
    address: Address,
    items: list[tuple[int, Write]],
    profile: ModelProfile,
    bind: Callable[[Address], Binding],
) -> None:
    if address.module_path is not None:
        leaf = Read(address.name)
        program.site(leaf, None).direct.append(WriteJob(leaf, (), tuple((row, write, ()) for row, write in items)))
        return
    if address.name in ATTENTION_POINTS:
        assert address.layer is not None
        program.attention_writes.setdefault(address.layer, []).extend(items)
        return
    axes, _ = axes_of(profile, address)
    placed = tuple((row, write, axes_of(profile, write.address)[1]) for row, write in items)
    binding = bind(address)
    expression = binding.writes_through
    site = _last_site(program, expression, address.layer)
    # What is read elsewhere is only carried by this tensor.
    jobs = site.direct if binding.write is None else site.carried
    jobs.append(WriteJob(expression, axes, placed))


def _last_site(program: Program, expression: Expression, layer: int | None) -> Site:
    *earlier, last = leaves(expression)
    for leaf in earlier:
        program.site(leaf, layer).kept = True
    return program.site(last, layer)
