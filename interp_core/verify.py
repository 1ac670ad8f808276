"""``model.verify()``: run the identities on the user's own checkpoint, and report each point, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from interp_core.address import Address
from interp_core.captures import Capture, prompt_like
from interp_core.checks import Check, difference, tolerance_of
from interp_core.errors import RequestError
from interp_core.functions import decode_residuals
from interp_core.identities import capture_identities
from interp_core.identities_norms import collapse_identities, norm_identities
from interp_core.identities_variants import variant_identities
from interp_core.tokens import read_tokens
from interp_core.transfers import transfer_identities
from interp_core.verdicts import UNCHECKED, Verification, judge

if TYPE_CHECKING:
    from interp_core.model import InterpModel

__all__ = ["examine", "verify"]


def verify(model: InterpModel, tokens: Any = None) -> Verification:
    """Run the identities on this very model, with its weights.

    Args:
        model: the model; its weights are loaded if they are not.
        tokens: one prompt of at least 3 tokens; ``None`` for a made-up one.

    Returns:
        A :class:`Verification`.

    Raises:
        CapabilityUnsupported: nothing can be captured on this backend.
        RequestError: ``tokens`` is not one prompt of at least 3 tokens.
    """
    model.profile.require("capture")
    ids = _prompt(model, tokens)
    return examine(Capture(model, ids), Capture(model, prompt_like(ids, model.vocab_size)))


def examine(
    here: Capture, there: Capture, *, more: Iterable[Check] = (), tolerance: float | None = None
) -> Verification:
    """Run every identity that the served points allow.

    Args:
        here: a prompt of the model.
        there: another one, as long, with another id at every position.
        more: further identities that have to hold.
        tolerance: largest error; ``None`` for that of the captured tensors' dtype.
    """
    model, get = here.model, here.get
    facts = model.facts
    if tolerance is None:
        floating = (row for row in here.rows.values() if row.is_floating_point())
        tolerance = tolerance_of(next(floating).dtype)
    checks = [
        *capture_identities(facts, get, tolerance),
        *norm_identities(facts, get, tolerance),
        *_tail(here, tolerance),
        *more,
    ]
    tried = [*variant_identities(facts, get, tolerance), *collapse_identities(facts, get, tolerance)]
    layers = judge(model.profile, checks, tried)
    left = {(n, at) for n, found in layers.items() for at, v in found.items() if v.state == UNCHECKED}
    if left and model.profile.refusal("steer") is None:
        tried += transfer_identities(here, there, left, tolerance)
        layers = judge(model.profile, checks, tried)
    return Verification(checks=checks, tried=tried, layers=layers)


def _prompt(model: InterpModel, tokens: Any) -> list[int]:
    if tokens is None:
        # Ids spread over the vocabulary, with a repetition: nothing special about any of them is needed.
        step = max(1, model.vocab_size // 13)
        tokens = [(7 + step * i) % model.vocab_size for i in range(12)] + [7]
    batch = read_tokens(tokens, model.facts)
    if not batch.single or len(batch.rows[0]) < 3:
        raise RequestError("verify takes one prompt of at least 3 tokens")
    return list(batch.rows[0])


def _tail(here: Capture, tolerance: float) -> list[Check]:
    model, get = here.model, here.get
    several = model.facts.n_streams > 1
    name, how = ("resid_streams", "head") if several else ("resid_post", None)
    last = model.n_layers - 1
    rows, head = get(name, last), get("lm_head", None)
    if rows is None or head is None or "raw_logits" not in model.profile.spec.capabilities:
        return []
    before = get(name, last - 1) if several else get("resid_pre", last)
    return [
        Check(
            identity=f"unembed(final_norm({'contraction of the ' if several else ''}last {name})) is lm_head",
            layer=None,
            proves=("lm_head", str(Address(name, last))),
            error=difference(decode_residuals(model, rows, reduction=how), head),
            control=None if before is None else difference(decode_residuals(model, before, reduction=how), head),
            tolerance=tolerance,
        )
    ]
