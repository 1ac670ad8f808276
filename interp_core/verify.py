"""``model.verify()``: run the identities on the user's own checkpoint, and report each point, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from interp_core.address import Address
from interp_core.captures import Capture, prompt_like
from interp_core.checks import Check, difference, tolerance_of
from interp_core.discovery import one_line
from interp_core.errors import InterpError, RequestError
from interp_core.functions import decode_residuals
from interp_core.hints import find_hints
from interp_core.identities import capture_identities
from interp_core.identities_norms import collapse_identities, norm_identities
from interp_core.identities_variants import variant_identities
from interp_core.judging import Bench
from interp_core.landings import write_identities
from interp_core.logits import finished
from interp_core.tokens import read_tokens
from interp_core.transfers import gate_transfers, transfer_identities, write_transfers
from interp_core.verdicts import FAILED, UNCHECKED, Verification, places_of

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.model import InterpModel

__all__ = ["examine", "verify"]

_STEPS: Final = 5
"""As many as :func:`examine` tells of."""


def verify(model: InterpModel, tokens: Any = None, *, progress: bool = False) -> Verification:
    """Run the identities on this very model, with its weights: on captured tensors, and by writing where it can.

    Args:
        model: the model; its weights are loaded if they are not.
        tokens: one prompt of at least 3 tokens; ``None`` for a made-up one.
        progress: show a bar on standard error.

    Returns:
        A :class:`Verification`.

    Raises:
        CapabilityUnsupported: nothing can be captured on this backend.
        RequestError: ``tokens`` is not one prompt of at least 3 tokens.
    """
    model.profile.require("capture")
    ids = _prompt(model, tokens)
    here, there = Capture(model, ids), Capture(model, prompt_like(ids, model.vocab_size))
    with _bar(progress) as told:
        return examine(here, there, told=told)


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[str], None]]:
    from tqdm.auto import tqdm

    with tqdm(total=_STEPS, desc="verify", disable=not shown, leave=False) as bar:

        def told(step: str) -> None:
            bar.set_postfix_str(step)
            bar.update()

        yield told


def examine(
    here: Capture,
    there: Capture,
    *,
    more: Iterable[Check] = (),
    tolerance: float | None = None,
    writes: bool = True,
    told: Callable[[str], None] = lambda step: None,
) -> Verification:
    """Run every identity that the served points allow.

    Args:
        here: a prompt of the model.
        there: another one, as long, with another id at every position.
        more: further identities that have to hold.
        tolerance: largest error; ``None`` for that of the captured tensors' dtype.
        writes: whether points that can be written are written.
        told: is called with what is done next.
    """
    told("capturing")
    model, facts, get = here.model, here.model.facts, here.get
    if tolerance is None:
        dtypes = [row.dtype for row in here.rows.values() if row.is_floating_point()]
        tolerance = tolerance_of(dtypes[0] if dtypes else "float32")
    told("identities of what was captured")
    bench = Bench(model.profile)
    bench.checks += [*capture_identities(facts, get, tolerance), *norm_identities(facts, get, tolerance), *more]
    bench.tried += [*variant_identities(facts, get, tolerance), *collapse_identities(facts, get, tolerance)]
    told("decoding the last residual")
    bench.checks += [*_tail(here, tolerance), *_unreadable(here)]
    steers = model.profile.refusal("steer") is None
    if steers and writes:
        told("writing")
        bench.checks += write_identities(here, tolerance, places_of(bench.layers(), FAILED))
    left = places_of(bench.layers(), UNCHECKED)
    if steers and left:
        told("another prompt's rows in place of this one's")
        bench.tried += transfer_identities(here, there, left, tolerance)
        bench.tried += gate_transfers(here, there, left, tolerance)
        bench.tried += write_transfers(here, there, left, tolerance)
    layers, failed = bench.layers(), [check for check in bench.checks if check.fails]
    hints = [*bench.suspects(layers), *find_hints(facts, get, failed, tolerance)] if failed else []
    return Verification(checks=bench.checks, tried=bench.tried, layers=layers, hints=hints)


def _unreadable(here: Capture) -> list[Check]:
    """A failed check for each point that is said to be served, and whose reading fails."""
    return [
        Check(
            identity=f"{address} can be read ({error})",
            layer=address.layer,
            proves=(),
            error=float("inf"),
            control=None,
            tolerance=0.0,
            concerns=(address.name,),
        )
        for address, error in here.errors.items()
    ]


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
    last = model.facts.last_layer
    rows, head = get(name, last), get("lm_head", None)
    if rows is None and head is not None:
        return _first_step(here, head, tolerance)
    if rows is None or head is None or "raw_logits" not in model.profile.spec.capabilities:
        return []
    before = get(name, last - 1) if several else get("resid_pre", last)
    identity = f"unembed(final_norm({'contraction of the ' if several else ''}last {name})) is lm_head"
    control, error = None, float("inf")
    try:
        error = difference(decode_residuals(model, rows, reduction=how), head)
        if before is not None:
            control = difference(decode_residuals(model, before, reduction=how), head)
    except InterpError as problem:
        identity += f" ({one_line(problem)})"
    proves = ("lm_head", str(Address(name, last)))
    return [Check(identity=identity, layer=None, proves=proves, error=error, control=control, tolerance=tolerance)]


def _first_step(here: Capture, head: Tensor, tolerance: float) -> list[Check]:
    """Where no residual is served: the model chooses its next token by the last row of its unembedding."""
    if here.model.profile.refusal("step_logits") is not None:
        return []
    try:
        logits = next(here.model.generate_stream(here.tokens, max_tokens=1)).logits
    except RequestError:
        return []  # it does not generate
    if logits is None:
        return []
    rows = finished(head.float(), here.model.facts).to(logits.device)
    return [
        Check(
            identity="the last row of lm_head, as the family finishes it, is what the next token is chosen by",
            layer=None,
            proves=("lm_head",),
            error=difference(rows[-1], logits),
            control=difference(rows[-2], logits),
            tolerance=tolerance,
        )
    ]
