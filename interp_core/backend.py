"""What a backend is: the description that a plugin registers, and the contract that its object keeps.

A description is light: importing it loads no engine. The object behind ``factory`` is made at
``warmup()`` or first use; it executes requests that the core has already validated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import evolve, field, frozen

from interp_core.converters import as_frozenset, as_tuple
from interp_core.facts import ModelFacts
from interp_core.gradients import GradSupport
from interp_core.keywords import OptionSpec
from interp_core.points import PointSupport

if TYPE_CHECKING:
    from interp_core.profile import ModelProfile
    from interp_core.requests import ForwardRequest, ForwardResult, GenerationRun

__all__ = [
    "Adoption",
    "Availability",
    "Backend",
    "BackendSpec",
    "BatchBackend",
    "LensBackend",
    "ModuleBackend",
    "OptionSpec",
    "StaticSets",
]


@frozen
class Availability:
    """Whether a backend can run in this environment, and if not, what is missing."""

    ok: bool
    reason: str = ""


@frozen(kw_only=True)
class StaticSets:
    """Addresses that a compiled backend serves, as declared by load options.

    Attributes:
        points: addresses (as text, ranges allowed) with a read tap.
        writes: addresses (as text, ranges allowed) with a write site.
        memory: bytes that taps and write sites take, from the profile they are part of; ``None`` if unknown.
    """

    points: tuple[str, ...] = field(default=(), converter=as_tuple)
    writes: tuple[str, ...] = field(default=(), converter=as_tuple)
    memory: Callable[[ModelProfile], int] | None = None


@frozen(kw_only=True, eq=False)
class Adoption:
    """A model that is in memory already, as a backend that can run it describes it.

    Attributes:
        model_id: where it came from, if it says so, else the name of its class.
        config: its transformers configuration.
        options: the load options that describe it as it is, such as its dtype.
        make: makes the backend object that runs this very model: called as ``make(profile, options)`` at warm-up.
    """

    model_id: str
    config: Any
    options: Mapping[str, Any]
    make: Callable[[ModelProfile, Mapping[str, Any]], Backend]


def _always_available() -> Availability:
    return Availability(True)


@frozen(kw_only=True)
class BackendSpec:
    """A backend, described. Returned by the hook ``interp_backends``.

    Attributes:
        name: the name that ``load_model(..., backend=name)`` takes.
        summary: one sentence for ``interp plugins``.
        factory: ``"package.module:callable"``, called as ``callable(profile, options)`` at warm-up;
            returns a :class:`Backend`, or raises ``BackendUnavailable``.
        probe: tells whether the backend can run here, from metadata, without importing the engine.
        points: support of each general point; what is missing is not supported.
        capabilities: names of the rows of ``CAPABILITIES`` that it serves.
        lacks: mechanical reason for rows that it does not serve; the table's own words otherwise.
        hooks: whether it can capture or steer at all.
        graph_replay: whether a compiled or replayed graph runs instead of Python forwards.
        rank: place in ``backend="auto"``, the highest available first; ``None`` is never chosen.
        options: keywords that it understands.
        grad: verdict on gradients from facts and options.
        limits: what of ``points`` it serves less of on a model, from facts and options: support that
            replaces the general one, by point. ``None`` if every model is served alike.
        concurrent: whether it takes calls from several threads at once, and runs their requests together.
        static: declared taps and write sites from facts and options; ``None`` if it has no such sets.
        adopt: ``"package.module:callable"`` that takes a model in memory and returns an :class:`Adoption`, or raises
            ``RequestError`` where the object is not what this backend runs; empty if it takes none.
        demo_model: ``"package.module:callable"`` that prepares a small real model and returns its
            folder, for ``interp demo``; ``None`` if the backend has none.
        owner: the distribution; filled in by the host.
    """

    name: str
    summary: str
    factory: str
    probe: Callable[[], Availability] = _always_available
    points: Mapping[str, PointSupport] = field(factory=dict, eq=False)
    capabilities: frozenset[str] = field(default=frozenset(), converter=as_frozenset)
    lacks: Mapping[str, str] = field(factory=dict, eq=False)
    hooks: bool = True
    graph_replay: bool = False
    rank: int | None = 0
    options: tuple[OptionSpec, ...] = field(default=(), converter=as_tuple)
    grad: Callable[[ModelFacts, Mapping[str, Any]], GradSupport] | None = None
    limits: Callable[[ModelFacts, Mapping[str, Any]], Mapping[str, PointSupport]] | None = None
    concurrent: bool = False
    static: Callable[[ModelFacts, Mapping[str, Any]], StaticSets] | None = None
    adopt: str = ""
    demo_model: str | None = None
    owner: str = ""

    def owned_by(self, distribution: str) -> BackendSpec:
        """The same description with its owner filled in."""
        return evolve(self, owner=distribution)


@runtime_checkable
class Backend(Protocol):
    """The object behind a backend: thin, and given only validated requests.

    One caller at a time unless its description says ``concurrent``; the core serialises callers of a
    synchronous backend.
    """

    def warmup(self) -> None:
        """Load weights and make ready. Called once, before anything else."""

    def shutdown(self) -> None:
        """Free memory and processes. May be called twice, and before ``warmup``."""

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """Execute requests without sampling, batched as the backend likes; results in the same order."""

    def generate(self, request: ForwardRequest) -> GenerationRun:
        """Begin one request with sampling.

        Nothing runs before the first step is asked for, unless the backend is concurrent: it may begin at once.
        """

    def unembed(self, rows: Any, *, raw: bool) -> Any:
        """Logits ``[rows, vocab]`` of residual rows ``[rows, d_model]``, through the final norm.

        Rows ``[rows, streams, d_model]`` go through the trunk's own contraction first.

        ``raw`` leaves out the family's softcap and multiplier. CPU tensor in, CPU tensor out.
        """


@runtime_checkable
class BatchBackend(Protocol):
    """What a synchronous backend may have beside: generations that share their forwards."""

    def generate_together(self, requests: Sequence[ForwardRequest]) -> list[Mapping[int, GenerationRun]]:
        """Begin requests with sampling, in batches; nothing runs before the first step of a batch is asked for.

        Returns:
            Batches, in the order in which they are to be run; each maps numbers of requests to their runs, every
            number once in all. The runs of a batch are asked for steps in turn, so that none runs far ahead.
        """


@runtime_checkable
class LensBackend(Protocol):
    """What a backend may have beside: the lens where the unembedding is, so that no vocabulary has to travel."""

    def top_tokens(self, rows: Any, count: int) -> tuple[Any, Any]:
        """The ``count`` most likely tokens of residual rows ``[rows, d_model]``, with the family's own logits.

        Returns:
            Ids ``[rows, count]``, int64, best first, and float32 probabilities ``[rows, count]``.
        """


@runtime_checkable
class ModuleBackend(Protocol):
    """What a backend in this process may have beside: rows through one of the model's own modules."""

    def through(self, role: str, layer: int | None, rows: Any) -> Any:
        """``[rows, width]`` through the module of a role, such as ``attn.o_proj``; where and as the rows were."""


def support_of(spec: BackendSpec, point: str) -> PointSupport:
    """A backend's own support of a general point."""
    default = PointSupport("none", False, f"the backend {spec.name!r} does not declare this point")
    return spec.points.get(point, default)


def make_backend(spec: BackendSpec, profile: ModelProfile, options: Mapping[str, Any]) -> Backend:
    """Import the factory of ``spec`` and call it."""
    from interp_core.lazy import load_object

    backend: Backend = load_object(spec.factory)(profile, options)
    return backend
