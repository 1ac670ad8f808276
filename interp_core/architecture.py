"""What an architecture is: the description of a trunk that a plugin registers.

A conventional decoder needs none: the core reads its facts, and each backend finds its modules by
structure. An architecture says what is different: facts, points of its own, the residual basis, and
per backend where the tensors are (``bindings``, in the words of that backend).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from interp_core.converters import as_frozenset, as_tuple
from interp_core.facts import ModelFacts
from interp_core.keywords import OptionSpec
from interp_core.points import PointSpec, PointSupport
from interp_core.residual import ResidualBasis

__all__ = ["Architecture", "Claim"]


@frozen(kw_only=True)
class Claim:
    """Which configurations an architecture is for. All given parts must match.

    Attributes:
        model_types: values of ``model_type`` of the trunk's configuration.
        class_names: class names that a checkpoint may give under ``architectures``.
        keys: configuration keys that must be present and not ``None``.
        overrides: names of architectures that this one is meant to replace where both match.
    """

    model_types: frozenset[str] = field(default=frozenset(), converter=as_frozenset)
    class_names: frozenset[str] = field(default=frozenset(), converter=as_frozenset)
    keys: frozenset[str] = field(default=frozenset(), converter=as_frozenset)
    overrides: frozenset[str] = field(default=frozenset(), converter=as_frozenset)

    def specificity(self, model_type: str, class_names: frozenset[str], keys: frozenset[str]) -> int:
        """How specifically the claim matches; 0 if it does not.

        A class name counts 100, a model type 10, each key 1.
        """
        if not (self.model_types or self.class_names or self.keys):
            return 0
        score = 0
        if self.class_names:
            if not self.class_names & class_names:
                return 0
            score += 100
        if self.model_types:
            if model_type not in self.model_types:
                return 0
            score += 10
        if not self.keys <= keys:
            return 0
        return score + len(self.keys)


@frozen(kw_only=True)
class Architecture:
    """A trunk, described. Returned by the hook ``interp_architectures``.

    Attributes:
        name: the architecture's name, unique over all plugins.
        summary: one sentence for ``interp plugins`` and ``interp describe``.
        claim: which configurations it is for.
        facts: corrects and completes the facts read from a configuration: ``facts(config, facts)``
            returns the record to use; it should set ``structure_known``.
        points: points that this trunk adds, with their definitions.
        support: per backend name, support of points that differs from the backend's own, and of the
            added points.
        refused: points of the general table that have no meaning here, each with what to call instead.
        stream_points: general points that need a ``stream`` coordinate on this trunk.
        residual_basis: the basis, from the facts; ``None`` for the conventional one.
        bindings: per backend name, ``"package.module:name"`` of an object in that backend's words.
        config: ``"package.module:Class"`` of a transformers configuration, where transformers does not know the
            claimed ``model_types`` itself.
        models: per backend name, ``"package.module:Class"`` of the model in that backend's terms, where the engine does
            not have it.
        options: per backend name, keywords of ``load_model`` that only this trunk takes there.
        owner: the distribution; filled in by the host.
    """

    name: str
    summary: str
    claim: Claim
    facts: Callable[[Any, ModelFacts], ModelFacts] | None = None
    points: tuple[PointSpec, ...] = field(default=(), converter=as_tuple)
    support: Mapping[str, Mapping[str, PointSupport]] = field(factory=dict, eq=False)
    refused: Mapping[str, str] = field(factory=dict, eq=False)
    stream_points: frozenset[str] = field(default=frozenset(), converter=as_frozenset)
    residual_basis: Callable[[ModelFacts], ResidualBasis] | None = None
    bindings: Mapping[str, str] = field(factory=dict, eq=False)
    config: str = ""
    models: Mapping[str, str] = field(factory=dict, eq=False)
    options: Mapping[str, tuple[OptionSpec, ...]] = field(factory=dict, eq=False)
    owner: str = ""

    def owned_by(self, distribution: str) -> Architecture:
        """The same description with its owner, and that of its points, filled in."""
        return evolve(self, owner=distribution, points=tuple(evolve(p, owner=distribution) for p in self.points))
