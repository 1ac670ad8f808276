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
        yield from _around_the_block(facts, layer.index, get, tolerance)
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


def _around_the_block(facts: ModelFacts, layer: int, get: Get, tolerance: float) -> Iterator[Check]:
    """One update around both sublayers: mixed before attention, written behind the MLP.

    Both work on one stream; what it gained is written to all, and something else is added alike to all but the first.
    """
    active = facts.extra.get("active_stream")
    mix, write = get("attn_stream_mix", layer), get("mlp_stream_write", layer)
    collapse = get("attn_stream_collapse", layer)
    before, after = get("resid_pre", layer), get("resid_post", layer)
    if active is None or mix is None or write is None or collapse is None or before is None or after is None:
        return
    mixed, turned = mix @ before, mix.transpose(-1, -2) @ before
    yield Check(
        identity="attn_stream_mix @ resid_pre has attn_stream_collapse for its active stream",
        layer=layer,
        proves=("attn_stream_mix", "attn_stream_collapse", "resid_pre"),
        error=difference(mixed[:, active], collapse),
        control=difference(turned[:, active], collapse),
        tolerance=tolerance,
    )
    if active != 0 or facts.n_streams < 3:
        return
    yield Check(
        identity="attn_stream_mix @ resid_pre + mlp_stream_write (x) what the active stream gained is resid_post, "
        "but for what is added alike to all streams behind the first",
        layer=layer,
        proves=("attn_stream_mix", "mlp_stream_write", "resid_post"),
        error=_unlike(mixed, write, after),
        control=min(_unlike(turned, write, after), _unlike(mixed, write.roll(1, -1), after)),
        tolerance=tolerance,
    )


def _unlike(mixed: Tensor, write: Tensor, after: Tensor) -> float:
    """How much what remains of each stream behind the second differs from what remains of the second.

    Both are small differences of stacks that were rounded at their own sizes, so more than rounding has to differ.
    """
    mixed, write = mixed.to(after.dtype), write.to(after.dtype)
    weights = (write / write[:, :1]).unsqueeze(-1)
    begun, ended = weights * mixed[:, :1], weights * after[:, :1]
    made = mixed + ended - begun
    left = after[:, 1:2] - made[:, 1:2]
    parts = (mixed, begun, ended, after)
    terms = (*(part[:, 2:] for part in parts[:3]), *(part[:, 1:2].expand_as(after[:, 2:]) for part in parts))
    return misfit(made[:, 2:] + left, after[:, 2:], terms)


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
