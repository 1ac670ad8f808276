"""``model.verify()``: run the identities on the user's own checkpoint, and report each point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from interp_core.address import Address
from interp_core.checks import Check, difference
from interp_core.converters import as_tuple
from interp_core.errors import RequestError
from interp_core.functions import decode_residuals, run_with_cache
from interp_core.identities import capture_identities
from interp_core.tokens import read_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache
    from interp_core.model import InterpModel
    from interp_core.points import PointSpec

__all__ = ["Verification", "verify"]

_TOLERANCE: Final = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative to the largest value. Halves are compared after sums that the model rounded in another order."""


@frozen(kw_only=True)
class Verification:
    """What the identities say about each point of a model.

    Attributes:
        checks: every identity that was run.
        points: per point ``proven``, ``failed``, ``absent`` (the trunk has none, or the backend does not
            serve it) or ``unchecked`` (served, and no identity on captured tensors pins it down).
    """

    checks: tuple[Check, ...] = field(converter=as_tuple)
    points: dict[str, str] = field(factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.holds for check in self.checks)

    def failed(self) -> tuple[Check, ...]:
        """The identities that do not hold."""
        return tuple(check for check in self.checks if not check.holds)


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
    served = [
        address
        for spec in model.points()
        for layer in ([None] if spec.scope == "trunk" else range(model.n_layers))
        for address in _addresses(model, spec, layer)
    ]
    cache = run_with_cache(model, ids, served)
    tolerance = _TOLERANCE.get(str(next(iter(cache.values())).dtype).removeprefix("torch."), 3e-2)
    checks = [*capture_identities(model.facts, _getter(cache), tolerance), *_tail(model, cache, tolerance)]
    return Verification(checks=checks, points=_verdicts(model, checks))


def _prompt(model: InterpModel, tokens: Any) -> list[int]:
    if tokens is None:
        # Ids spread over the vocabulary, with a repetition: nothing special about any of them is needed.
        step = max(1, model.vocab_size // 13)
        tokens = [(7 + step * i) % model.vocab_size for i in range(12)] + [7]
    batch = read_tokens(tokens, model.facts)
    if not batch.single or len(batch.rows[0]) < 3:
        raise RequestError("verify takes one prompt of at least 3 tokens")
    return list(batch.rows[0])


def _addresses(model: InterpModel, spec: PointSpec, layer: int | None) -> list[Address]:
    """A point as a whole, or by its single streams where it is refused as a whole; nothing if it is not served."""
    whole = Address(spec.name, layer)
    if not spec.integer and model.profile.read_refusal(whole) is None:
        return [whole]
    if spec.integer or spec.axes[:1] != ("streams",):
        return []
    streams = [Address(spec.name, layer, (("stream", k),)) for k in range(model.facts.n_streams)]
    return [address for address in streams if model.profile.read_refusal(address) is None]


def _getter(cache: Cache) -> Any:
    import torch

    streams = {a.coordinate("stream") for a in cache} - {None}

    def get(name: str, layer: int | None) -> Tensor | None:
        address = Address(name, layer)
        if address in cache:
            return cache[address][0]
        parts = [Address(name, layer, (("stream", k),)) for k in sorted(s for s in streams if s is not None)]
        if parts and all(part in cache for part in parts):
            return torch.stack([cache[part][0] for part in parts], dim=1)
        return None

    return get


def _tail(model: InterpModel, cache: Cache, tolerance: float) -> list[Check]:
    several = model.facts.n_streams > 1
    name, how = ("resid_streams", "head") if several else ("resid_post", None)
    last = Address(name, model.n_layers - 1)
    if last not in cache or Address("lm_head") not in cache or "raw_logits" not in model.profile.spec.capabilities:
        return []
    head, rows = cache["lm_head"][0], cache[last][0]
    earlier = Address(name, model.n_layers - 2) if several else Address("resid_pre", model.n_layers - 1)
    before = cache.get(earlier) if model.n_layers > 1 or not several else None
    return [
        Check(
            identity=f"unembed(final_norm({'contraction of the ' if several else ''}last {name})) is lm_head",
            layer=None,
            proves=("lm_head", name),
            error=difference(decode_residuals(model, rows, reduction=how), head),
            control=None if before is None else difference(decode_residuals(model, before[0], reduction=how), head),
            tolerance=tolerance,
        )
    ]


def _verdicts(model: InterpModel, checks: list[Check]) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    for spec in model.points():
        mine = [check for check in checks if spec.name in check.proves]
        if not model.profile.support(spec.name).readable or None in spec.absent:
            verdicts[spec.name] = "absent"
        elif not mine:
            verdicts[spec.name] = "unchecked"
        else:
            verdicts[spec.name] = "proven" if all(check.holds for check in mine) else "failed"
    return verdicts
