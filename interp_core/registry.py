"""Merge: from what plugins registered and what a configuration says to one profile.

Conflicts of names are settled when plugins load (:mod:`interp_core.host`); conflicts of claims can be
seen only with a configuration in hand, and are settled here. Nothing depends on installation order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from interp_core.architecture import Architecture
from interp_core.backend import BackendSpec, StaticSets, support_of
from interp_core.capabilities import Capability
from interp_core.contained import call_plugin
from interp_core.errors import PluginConflict
from interp_core.facts import ModelFacts
from interp_core.gradients import GradSupport
from interp_core.points import GENERAL_POINTS, PointSpec, PointSupport, unsupported
from interp_core.presence import absences
from interp_core.profile import ModelProfile
from interp_core.residual import ResidualBasis
from interp_core.resolution import resolve_addresses

__all__ = ["build_profile", "choose_architecture", "complete_facts", "own_configurations"]


def choose_architecture(
    facts: ModelFacts, config_keys: Iterable[str], known: Iterable[Architecture]
) -> Architecture | None:
    """The architecture with the most specific claim, or ``None`` if nothing claims the configuration.

    Raises:
        PluginConflict: two claims are equally specific and neither says that it overrides the other.
    """
    keys, classes = frozenset(config_keys), frozenset({facts.architecture} - {""})
    scored = [(a.claim.specificity(facts.model_type, classes, keys), a) for a in known]
    best = max((score for score, _ in scored), default=0)
    if best == 0:
        return None
    winners = [a for score, a in scored if score == best]
    overridden = {name for a in winners for name in a.claim.overrides}
    winners = [a for a in winners if a.name not in overridden]
    if len(winners) == 1:
        return winners[0]
    named = " and ".join(sorted(f"{a.name!r} of {a.owner}" for a in winners))
    raise PluginConflict(
        f"{named} claim {facts.model_type!r} equally specifically. Switch one off with INTERP_DISABLE_PLUGINS, "
        "or let one name the other in Claim(overrides=...)."
    )


def own_configurations(known: Iterable[Architecture]) -> dict[str, str]:
    """Configuration classes by ``model_type`` that architectures bring."""
    return {kind: a.config for a in known if a.config for kind in a.claim.model_types}


def complete_facts(config: Any, facts: ModelFacts, architecture: Architecture | None) -> ModelFacts:
    """Facts as the claiming architecture corrects them."""
    if architecture is None or architecture.facts is None:
        return facts
    return call_plugin("facts of its architecture", architecture.owner, architecture.facts, config, facts)


def build_profile(
    *,
    model_id: str,
    facts: ModelFacts,
    architecture: Architecture | None,
    spec: BackendSpec,
    backends: Mapping[str, BackendSpec],
    capabilities: Mapping[str, Capability],
    options: Mapping[str, Any],
    passed_over: Mapping[str, str],
) -> ModelProfile:
    """Answer everything that needs no weights.

    Raises:
        AddressError: a declared static set names what does not exist.
        RequestError: a declared static set is not valid.
    """
    specs = _specs(facts, architecture, backends, _limits(spec, facts, options))
    sets = _static_sets(spec, facts, options)
    profile = ModelProfile(
        model_id=model_id,
        spec=spec,
        facts=facts,
        architecture=architecture,
        specs=specs,
        capabilities=dict(capabilities),
        residual_basis=_basis(facts, architecture),
        grad_support=_grad(spec, facts, options),
        static_points=resolve_addresses(sets.points, specs, facts),
        static_writes=resolve_addresses(sets.writes, specs, facts),
        options=dict(options),
        passed_over=dict(passed_over),
    )
    if sets.memory is None:
        return profile
    return evolve(profile, static_bytes=call_plugin("memory of its static sets", spec.owner, sets.memory, profile))


def _limits(
    chosen: BackendSpec, facts: ModelFacts, options: Mapping[str, Any]
) -> Mapping[str, Mapping[str, PointSupport]]:
    """Support by point of the chosen backend, where this model or these options leave it less."""
    if chosen.limits is None:
        return {}
    return {chosen.name: call_plugin("the limits of its points", chosen.owner, chosen.limits, facts, options)}


def _specs(
    facts: ModelFacts,
    architecture: Architecture | None,
    backends: Mapping[str, BackendSpec],
    limits: Mapping[str, Mapping[str, PointSupport]],
) -> dict[str, PointSpec]:
    specs: dict[str, PointSpec] = {}
    for general in GENERAL_POINTS.values():
        spec, absent = general, absences(general, facts)
        support = {name: support_of(backend, spec.name) for name, backend in backends.items()}
        support |= {name: table[spec.name] for name, table in limits.items() if spec.name in table}
        if architecture is not None:
            spec, absent = _adapted(spec, absent, facts, architecture)
            support |= _architecture_support(spec.name, architecture, backends)
        specs[spec.name] = evolve(spec, absent=absent, support=_where_present(support, absent))
    if architecture is not None:
        for own in architecture.points:
            missing = unsupported(f"the architecture {architecture.name!r} binds this point on other backends only")
            support = dict.fromkeys(backends, missing) | _architecture_support(own.name, architecture, backends)
            absent = {layer.index: layer.absent[own.name] for layer in facts.layers if own.name in layer.absent}
            specs[own.name] = evolve(own, absent=absent, support=support)
    return specs


def _adapted(
    spec: PointSpec, absent: dict[int | None, str], facts: ModelFacts, architecture: Architecture
) -> tuple[PointSpec, dict[int | None, str]]:
    """A general point as an architecture redefines it: per stream, or refused."""
    if spec.name in architecture.stream_points:
        return evolve(spec, axes=("streams", *spec.axes)), {}
    if spec.name in architecture.refused and not absent:
        return spec, {None: f"{spec.name} has no meaning on this trunk"}
    return spec, absent


def _architecture_support(
    name: str, architecture: Architecture, backends: Mapping[str, BackendSpec]
) -> dict[str, PointSupport]:
    return {b: table[name] for b, table in architecture.support.items() if b in backends and name in table}


def _where_present(support: Mapping[str, PointSupport], absent: Mapping[int | None, str]) -> dict[str, PointSupport]:
    """What is nowhere in the trunk is served by no backend, and the reason is the trunk's."""
    if None not in absent:
        return dict(support)
    return dict.fromkeys(support, unsupported(absent[None]))


def _basis(facts: ModelFacts, architecture: Architecture | None) -> ResidualBasis:
    if architecture is not None and architecture.residual_basis is not None:
        basis = architecture.residual_basis
        return call_plugin("the residual basis of its architecture", architecture.owner, basis, facts)
    sequential = not any(layer.parallel for layer in facts.layers)
    if facts.n_streams > 1:
        return ResidualBasis(
            n_streams=facts.n_streams,
            additive=False,
            sequential=sequential,
            lens_valid=False,
            blockers=(f"the trunk carries {facts.n_streams} residual streams and mixes them in every block",),
            instead="install the plugin that describes this trunk, and name a reduction of its streams",
        )
    if not facts.structure_known:
        return ResidualBasis(
            additive=False,
            sequential=sequential,
            lens_valid=False,
            blockers=(facts.other_form or f"the block structure of {facts.model_type!r} is not known",),
            instead="register an Architecture for it, from a plugin of your own",
        )
    if "layers" in facts.absent:
        return ResidualBasis(
            additive=False,
            sequential=sequential,
            lens_valid=False,
            blockers=(facts.absent["layers"],),
            instead="read lm_head, or modules by their paths on the eager backend",
        )
    if facts.contributions.attn_skip or facts.contributions.mlp_skip:
        normed = "normed" in (facts.contributions.attn_skip, facts.contributions.mlp_skip)
        what = "its own normed input" if normed else "the residual times weights of the checkpoint"
        return ResidualBasis(
            additive=False, sequential=sequential, blockers=(f"what a sublayer adds is added to {what}",)
        )
    if facts.norm_on_sum:
        return ResidualBasis(
            additive=False,
            sequential=sequential,
            blockers=("every block normalises the sum of the residual and each contribution",),
        )
    if any(facts.halved_after(layer.index) for layer in facts.layers):
        return ResidualBasis(
            additive=False,
            sequential=sequential,
            blockers=(f"the residual is halved after every {facts.halved_every} blocks",),
        )
    return ResidualBasis(sequential=sequential)


def _grad(spec: BackendSpec, facts: ModelFacts, options: Mapping[str, Any]) -> GradSupport:
    if spec.grad is not None:
        return call_plugin("the verdict on gradients", spec.owner, spec.grad, facts, options)
    return GradSupport(
        through_forward=False,
        blockers=(f"the backend {spec.name!r} does not run its forward under this process's autograd",),
        remedy="load_model(..., backend='eager', requires_grad=True)",
    )


def _static_sets(spec: BackendSpec, facts: ModelFacts, options: Mapping[str, Any]) -> StaticSets:
    if spec.static is None:
        return StaticSets()
    return call_plugin("the declaration of static sets", spec.owner, spec.static, facts, options)
