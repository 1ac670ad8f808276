"""What the numbers show where softmax attention fails its identities: heads in another order, other keys seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.checks import Check, Get, difference
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.fits import fit_factor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["heads_hints"]


def heads_hints(facts: ModelFacts, layer: LayerFacts, get: Get, failed: list[Check], tolerance: float) -> Iterator[str]:
    """Of one layer: which head of ``z`` is which head's sum, and how many keys a query sees."""
    probs, value, z = (get(name, layer.index) for name in ("attn_probs", "value", "z"))
    texts = [check.identity for check in failed]
    if probs is not None and value is not None and z is not None and "attn_probs @ value is z" in texts:
        yield from _heads(layer, probs, value, z, tolerance)
    if probs is not None and any(text.startswith("exactly the keys") for text in texts):
        yield from _window(layer, probs)


def _heads(layer: LayerFacts, probs: Tensor, value: Tensor, z: Tensor, tolerance: float) -> Iterator[str]:
    """Each head of ``z`` against every head's probabilities with every key/value head's values."""
    wanted = z.transpose(0, 1)
    made = {
        (head, kv): probs[head].to(value.dtype) @ value[:, kv]
        for head in range(probs.shape[0])
        for kv in range(value.shape[1])
    }
    group = layer.n_heads // layer.n_kv_heads
    found = []
    for head, rows in enumerate(wanted):
        fits = [pair for pair, summed in made.items() if difference(summed, rows) <= tolerance]
        if not fits:
            break
        # The expected pair first, so that equal heads do not make a hint.
        found.append((head, head // group) if (head, head // group) in fits else fits[0])
    if len(found) == len(wanted):
        wrong = [h for h, pair in enumerate(found) if pair != (h, h // group)]
        listed = "; ".join(f"{h}: probabilities of {found[h][0]}, values of {found[h][1]}" for h in wrong[:4])
        more = "" if len(wrong) <= 4 else f"; and {len(wrong) - 4} more"
        yield f"heads are in another order: of z's heads, {listed}{more}"
        return
    repeated = value.repeat_interleave(group, dim=1).transpose(0, 1)
    factor, error = fit_factor(probs.to(value.dtype) @ repeated, wanted)
    if error <= tolerance:
        yield f"z is {factor:.4g} times attn_probs @ value: the facts state no factor"


def _window(layer: LayerFacts, probs: Tensor) -> Iterator[str]:
    """How many keys the last query sees, if all that it sees stand together at the end."""
    seen = (probs > 0).flatten(0, -3).any(0) if probs.dim() > 2 else probs > 0
    last = seen[-1]
    count = int(last.sum())
    if count and bool(last[-count:].all()):
        stated = "no window" if layer.window is None else f"a window of {layer.window}"
        shown = "every key" if count == last.numel() else f"{count} keys"
        yield f"the last of {last.numel()} queries sees {shown}: the facts state {stated}"
