"""Identities of a trunk of several residual streams: how each sublayer makes the next stack of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get, difference, misfit
from interp_core.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["stream_identities"]

_STEPS = (("attn", "resid_pre", "resid_mid"), ("mlp", "resid_mid", "resid_post"))


def stream_identities(facts: ModelFacts, get: Get, tolerance: float) -> Iterator[Check]:
    """``mix @ stack + write (x) sublayer output`` is the next stack, for each sublayer whose parts were captured.

    Layers that add something else to the stack first (``extra["stream_additions"]``) leave their attention out.
    """
    added = facts.extra.get("stream_additions", ())
    for layer in facts.layers:
        yield from _same_stack(layer.index, get)
        for site, before, after in _STEPS:
            if site == "attn" and layer.index in added:
                continue
            parts = [get(f"{site}_stream_mix", layer.index), get(f"{site}_stream_write", layer.index)]
            parts += [get(f"{site}_out", layer.index), get(before, layer.index), get(after, layer.index)]
            present = [part for part in parts if part is not None]
            if len(present) == len(parts):
                yield _step(site, layer.index, present, (before, after), tolerance)


def _same_stack(layer: int, get: Get) -> Iterator[Check]:
    stack, post = get("resid_streams", layer), get("resid_post", layer)
    if stack is None or post is None:
        return
    yield Check(
        identity="resid_streams are the streams of resid_post",
        layer=layer,
        proves=("resid_streams", "resid_post"),
        error=difference(stack, post),
        control=difference(stack.roll(1, 1), post),
        tolerance=0.0,
    )


def _step(site: str, layer: int, parts: list[Tensor], stacks: tuple[str, str], tolerance: float) -> Check:
    mix, write, out, before, after = parts
    # Where the streams are still copies of one, or are not remixed, a matrix turned round changes nothing.
    terms = (mix.to(before.dtype) @ before, write.to(before.dtype).unsqueeze(-1) * out.unsqueeze(-2))
    wrong = max(
        misfit(_next(mix.transpose(-1, -2), write, out, before), after, terms),
        misfit(_next(mix, write.roll(1, -1), out, before), after, terms),
    )
    return Check(
        identity=f"{site}_stream_mix @ {stacks[0]} + {site}_stream_write (x) {site}_out is {stacks[1]}",
        layer=layer,
        proves=(f"{site}_stream_mix", f"{site}_stream_write", f"{site}_out", *stacks),
        error=misfit(sum(terms[1:], terms[0]), after, terms),
        control=wrong,
        tolerance=tolerance,
    )


def _next(mix: Tensor, write: Tensor, out: Tensor, stack: Tensor) -> Tensor:
    """The stack after a sublayer, in the stack's own dtype, as modelling code computes it."""
    return mix.to(stack.dtype) @ stack + write.to(stack.dtype).unsqueeze(-1) * out.unsqueeze(-2)
