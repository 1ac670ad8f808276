"""Identities by cause: put another prompt's rows in the place of a point, and what it feeds is that prompt's.

They pin down what a point is *for*. They hold only where the point is the whole input of what it feeds, which a
stranger cannot know of every trunk; so one that does not hold proves nothing, and is no fault by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from interp_core.address import Address
from interp_core.checks import Check, difference
from interp_core.operations import Replace
from interp_core.testing.served import Subject

__all__ = ["causal_identities"]

_FEEDS: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (("embeddings",), ("resid_pre",)),
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
    (("mlp_act",), ("mlp_out",)),
    (("mlp_out",), ("mlp_out_post",)),
    (("final_norm",), ("lm_head",)),
)
"""Points that are written together, and what they feed: the first of these that is served is read."""


def causal_identities(subject: Subject, needed: set[tuple[str, int | None]], tolerance: float) -> Iterator[Check]:
    """Transfers from a second prompt of the same length, for ``needed`` points ``(name, layer)``, where writable."""
    readable, writable = set(subject.readable()), set(subject.writable())
    for sources, fed in _FEEDS:
        for layer in _layers(subject, sources):
            addresses = [Address(name, layer) for name in sources]
            if not needed & {(name, layer) for name in sources} or not set(addresses) <= writable & readable:
                continue
            target = next((t for name in fed for t in _places(subject, name, layer) if t in readable), None)
            if target is not None:
                yield _transferred(subject, addresses, target, tolerance)


def _layers(subject: Subject, sources: tuple[str, ...]) -> list[int | None]:
    specs = subject.profile.specs
    if any(name not in specs for name in sources):
        return []
    return [None] if specs[sources[0]].scope == "trunk" else list(range(subject.profile.facts.n_layers))


def _places(subject: Subject, name: str, layer: int | None) -> list[Address]:
    """A point at the layer of what feeds it, or, of several streams, the first."""
    spec = subject.profile.specs.get(name)
    if spec is None or spec.scope == "trunk":
        return [Address(name)]
    at = 0 if layer is None else layer
    return [Address(name, at), Address(name, at, (("stream", 0),))]


def _transferred(subject: Subject, sources: list[Address], target: Address, tolerance: float) -> Check:
    here, there = subject.rows(), subject.rows(subject.other_prompt)
    writes = [Replace(address, there[address]) for address in sources]
    with subject.model.steer(writes):
        moved = subject.model.run_with_cache(subject.prompts[0], [target])[target][0]
    names = " and ".join(address.name for address in sources)
    return Check(
        identity=f"with another prompt's {names} in place, {target.name} is that prompt's",
        layer=sources[0].layer,
        proves=tuple(address.name for address in sources),
        error=difference(moved, there[target]),
        control=difference(here[target], there[target]),
        tolerance=tolerance,
    )
