"""Identities by cause: put another prompt's rows in the place of a point, and what it feeds is that prompt's.

They pin down what a point is *for*. They hold only where the point is the whole input of what it feeds, which a
stranger cannot know of every trunk; so one that does not hold proves nothing, and is no fault by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from attrs import frozen

from interp_core.address import Address
from interp_core.captures import Capture, getter, layers_of, parts_of
from interp_core.checks import Check, difference
from interp_core.discovery import one_line
from interp_core.errors import InterpError
from interp_core.facts import ModelFacts
from interp_core.functions import run_with_cache
from interp_core.operations import Replace
from interp_core.profile import ModelProfile

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gate_transfers", "transfer_identities", "write_transfers"]

_FEEDS: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (("embeddings",), ("resid_pre", "lm_head")),
    (("resid_pre",), ("resid_post",)),
    (("resid_mid",), ("resid_post",)),
    (("attn_stream_collapse",), ("attn_in", "attn_out")),
    (("mlp_stream_collapse",), ("mlp_in", "mlp_out")),
    (("attn_in",), ("attn_out", "z", "attn_out_post")),
    (("q_norm_in",), ("q_norm_out",)),
    (("k_norm_in",), ("k_norm_out",)),
    (("q_norm_out", "k_norm_out", "value"), ("z", "attn_out")),
    (("z",), ("attn_out",)),
    (("attn_out",), ("attn_out_post",)),
    (("mlp_in",), ("mlp_out", "mlp_out_post")),
    (("mlp_pre", "mlp_pre_linear"), ("mlp_act", "mlp_out")),
    (("mlp_pre",), ("mlp_act", "mlp_out")),
    (("mlp_act",), ("mlp_out",)),
    (("mlp_out",), ("mlp_out_post",)),
    (("resid_mid", "mlp_out"), ("resid_post",)),
    # Where the MLP feeds a mixer, which reads the residual too.
    (("resid_pre", "mlp_out"), ("attn_out_post",)),
    (("final_norm",), ("lm_head",)),
)
"""Points that are written together, and what they feed: the first of these that is served is read."""


def gate_transfers(
    here: Capture, there: Capture, needed: AbstractSet[tuple[str, int | None]], tolerance: float
) -> Iterator[Check]:
    """Where values are no point: with another gate in place, ``z`` changes by the ratio of what they become."""
    import torch.nn.functional as F

    activation = {"sigmoid": F.sigmoid, "softplus": F.softplus}[here.model.facts.attn_gate_activation]
    for name, layer in needed:
        gate, z = Address("attn_gate", layer), Address("z", layer)
        if name != "attn_gate" or z not in here.rows or here.model.profile.write_refusal(gate) is not None:
            continue
        mine, other = here.rows[gate], there.rows[gate]
        # One layer at a time: a write in an earlier one would change what is gated here.
        moved = run_with_cache(here.model, here.tokens, [z], steering=[Replace(gate, other)])[z][0]
        wanted = here.rows[z] * activation(other)
        yield Check(
            identity="with another prompt's attn_gate in place, z changes by the ratio of what the two become",
            layer=layer,
            proves=("attn_gate", "z"),
            error=difference(moved * activation(mine), wanted),
            control=difference(moved * activation(mine.roll(1, -1)), wanted),
            tolerance=tolerance,
        )


@frozen
class _Transfer:
    """One place: what is written there together, and what is read."""

    sources: tuple[Address, ...]
    target: Address


def transfer_identities(
    here: Capture, there: Capture, needed: AbstractSet[tuple[str, int | None]], tolerance: float
) -> Iterator[Check]:
    """Transfers from ``there`` into ``here`` for ``needed`` points ``(name, layer)``, where they can be written.

    What a point feeds is read before anything of the next layer can change it, so one forward does all layers.
    """
    for sources, fed in _FEEDS:
        jobs = [
            job for job in _transfers(here, there, sources, fed) if needed & {(a.name, a.layer) for a in job.sources}
        ]
        # Where what is read is what the next layer's write replaces, every other layer at a time.
        groups = [jobs[0::2], jobs[1::2]] if sources == ("resid_pre",) else [jobs]
        if any(_share(here, job) is not None for job in jobs):
            groups = [[job] for job in jobs]  # the other terms must be those of this prompt
        for group in groups:
            if group:
                yield from _transferred(here, there, group, tolerance)
    for name, layer in sorted((name, layer) for name, layer in needed if layer is not None):
        if name in _mediators(here.model.facts):
            yield from _effect(here, there, Address(name, layer), tolerance)


def _transfers(here: Capture, there: Capture, sources: tuple[str, ...], fed: tuple[str, ...]) -> Iterator[_Transfer]:
    profile, captured = here.model.profile, here.rows.keys() & there.rows.keys()
    if any(name not in profile.specs for name in sources):
        return
    if sources == ("resid_pre", "mlp_out") and profile.facts.contributions.mlp_reads != "attn_out":
        return
    for layer in layers_of(profile.specs[sources[0]], profile):
        addresses = tuple(Address(name, layer) for name in sources)
        if any(a not in captured or profile.write_refusal(a) is not None for a in addresses):
            continue
        target = next(
            (t for name in fed for t in _places(profile, name, layer) if t in here.rows and t in there.rows), None
        )
        if target is not None:
            yield _Transfer(addresses, target)


_CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "attn_out": ("attn_in",),
    "mlp_out": ("mlp_in", "mlp_act", "expert_weights"),
}
"""Points that change nothing of a block but that sublayer's output, and what follows."""

_EFFECTS: Final[Mapping[str, tuple[str, ...]]] = {"attn_out": ("resid_mid", "mlp_in"), "mlp_out": ("resid_post",)}


def _mediators(facts: ModelFacts) -> tuple[str, ...]:
    """Outputs of sublayers that no sum accounts for: more is added beside them, or to several streams."""
    if facts.n_streams > 1:
        return ("attn_out", "mlp_out")
    return ("mlp_out",) if facts.contributions.mlp_terms else ()


def _effect(here: Capture, there: Capture, output: Address, tolerance: float) -> Iterator[Check]:
    """Where more than the sublayer adds to what is behind it: the output alone has the effect of what made it."""
    profile = here.model.profile
    targets = (a for name in _EFFECTS[output.name] for a in _places(profile, name, output.layer))
    target = next((a for a in targets if a in here.rows), None)
    for cause in (Address(name, output.layer) for name in _CAUSES[output.name]):
        if cause not in here.rows or target is None:
            continue
        if profile.write_refusal(cause) is not None or profile.write_refusal(output) is not None:
            continue
        written = Replace(cause, there.rows[cause])
        made = run_with_cache(here.model, here.tokens, [output, target], steering=[written])
        again = run_with_cache(here.model, here.tokens, [target], steering=[Replace(output, made[output][0])])
        yield Check(
            identity=f"{output.name} as another prompt's {cause.name} makes it, in its place, "
            f"makes the same {target.name}",
            layer=output.layer,
            proves=(output.name,),
            error=difference(again[target][0], made[target][0]),
            control=difference(here.rows[target], made[target][0]),
            tolerance=tolerance,
        )
        return


def write_transfers(
    here: Capture, there: Capture, needed: AbstractSet[tuple[str, int | None]], tolerance: float
) -> Iterator[Check]:
    """With another sublayer output in place, the next stack of streams changes by the weights times the difference."""
    profile = here.model.profile
    for name, layer in sorted((name, layer) for name, layer in needed if layer is not None):
        site = name.removesuffix("_stream_write")
        output = Address(f"{site}_out", layer)
        if name == site or output not in here.rows or profile.write_refusal(output) is not None:
            continue
        spec = profile.specs[{"attn": "resid_mid", "mlp": "resid_post"}[site]]
        write, parts = here.get(name, layer), parts_of(profile, spec, layer)
        if write is None or not parts:
            continue
        moved = run_with_cache(here.model, here.tokens, parts, steering=[Replace(output, there.rows[output])])
        stack = getter({a: moved[a][0] for a in parts}, profile.facts.n_streams)(spec.name, layer)
        before = here.get(spec.name, layer)
        if stack is None or before is None:
            continue
        change = (there.rows[output] - here.rows[output]).unsqueeze(-2)
        write = write.to(change.dtype).unsqueeze(-1)
        yield Check(
            identity=f"with another prompt's {output.name} in place, {spec.name} changes by {name} (x) the difference",
            layer=layer,
            proves=(name, output.name),
            error=difference(before + write * change, stack),
            control=difference(before + write.roll(1, -2) * change, stack),
            tolerance=tolerance,
        )


def _share(here: Capture, job: _Transfer) -> float | None:
    """The factor on what was moved, where the target is a sum of several terms; else ``None``."""
    source, facts = job.sources[0], here.model.facts
    half = source.name.removesuffix("_out")
    terms = {"attn": facts.contributions.attn_terms, "mlp": facts.contributions.mlp_terms}.get(half, ())
    if source.layer is None or half not in terms or job.target.name != f"{source.name}_post":
        return None
    return facts.residual_multiplier * facts.layers[source.layer].factors.get(half, 1.0)


def _wanted(here: Capture, there: Capture, job: _Transfer) -> Tensor:
    share = _share(here, job)
    if share is None:
        return there.rows[job.target]
    return here.rows[job.target] + share * (there.rows[job.sources[0]] - here.rows[job.sources[0]])


def _places(profile: ModelProfile, name: str, layer: int | None) -> list[Address]:
    """A point at the layer of what feeds it, or, of several streams, the first."""
    spec = profile.specs.get(name)
    if spec is None or spec.scope == "trunk":
        return [Address(name)]
    at = 0 if layer is None else layer
    return [Address(name, at), Address(name, at, (("stream", 0),))]


def _transferred(here: Capture, there: Capture, jobs: list[_Transfer], tolerance: float) -> Iterator[Check]:
    writes = [Replace(address, there.rows[address]) for job in jobs for address in job.sources]
    said = ""
    try:
        moved = run_with_cache(here.model, here.tokens, [job.target for job in jobs], steering=writes)
    except InterpError as error:
        said = f" ({one_line(error)})"
    for job in jobs:
        names = " and ".join(address.name for address in job.sources)
        wanted = _wanted(here, there, job)
        yield Check(
            identity=f"with another prompt's {names} in place, {job.target.name} is that prompt's{said}",
            layer=job.sources[0].layer,
            proves=tuple(address.name for address in job.sources),
            error=float("inf") if said else difference(moved[job.target][0], wanted),
            control=difference(here.rows[job.target], wanted),
            tolerance=tolerance,
        )
