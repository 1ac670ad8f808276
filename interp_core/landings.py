"""Identities of writes: a zero changes nothing; a vector lands where it was put, and changes only what lies behind.

They say that a point is written where it is read, not that it is the right tensor: they can find one wrong, and prove
none by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

import attrs

from interp_core.address import Address
from interp_core.captures import Capture
from interp_core.checks import Check, apart, difference, tolerance_of
from interp_core.discovery import one_line
from interp_core.errors import InterpError
from interp_core.facts import ModelFacts
from interp_core.fits import fit_gain
from interp_core.functions import run_with_cache
from interp_core.operations import Add
from interp_core.profile import ModelProfile
from interp_core.steering import steer

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache

__all__ = ["exactness", "write_identities"]

_STAGES: Final = (
    ("resid_pre",),
    ("attn_in",),
    ("q_norm_in", "k_norm_in", "value", "attn_gate"),
    ("q_norm_out", "k_norm_out"),
    ("attn_scores",),
    ("attn_probs",),
    ("z",),
    ("attn_out",),
    ("attn_out_post",),
    ("resid_mid",),
    ("mlp_in",),
    ("mlp_pre", "mlp_pre_linear", "router_logits"),
    ("mlp_act", "expert_weights"),
    ("mlp_out",),
    ("mlp_out_post",),
    ("resid_post",),
)
"""The points of a block in the order of the forward: what is written in one stage changes nothing of an earlier one."""

_STAGE: Final = {name: number for number, names in enumerate(_STAGES) for name in names}
_OF_KEYS: Final = ("k_norm_in", "k_norm_out", "value")
_LOOKED_AT: Final = 1e-5
_BEHIND: Final = {"embeddings": ("resid_pre", 0), "final_norm": ("lm_head", None)}


def exactness(profile: ModelProfile) -> float:
    """How far apart two runs of one request may be: 0, or rounding where rows are batched by something else.

    That is a concurrent backend's own batching, or that of experts, whose rows are those that chose them.
    """
    batched = profile.spec.concurrent or any(layer.mlp == "sparse" for layer in profile.facts.layers)
    return 2e-6 if batched else 0.0


def write_identities(
    here: Capture, tolerance: float, wrong: AbstractSet[tuple[str, int | None]] = frozenset()
) -> Iterator[Check]:
    """A zero at every writable point at once; then one vector at each point of the first layer of every kind.

    Args:
        here: the prompt.
        tolerance: largest error.
        wrong: points ``(name, layer)`` that are not what they should be, which say nothing about writes.
    """
    import torch

    profile = here.model.profile
    sound = [a for a in here.rows if (a.name, a.layer) not in wrong]
    writable = [a for a in sound if _written(profile, a)]
    if not writable:
        return
    yield from _harmless(here, {a: Add(a, torch.zeros(profile.shape(a))) for a in writable}, sound)
    first = _first_of_each_kind(profile.facts)
    for address in writable:
        if address.name in _BEHIND or (address.layer in first and address.name in _STAGE):
            try:
                yield from _landed(here, address, sound, tolerance)
            except InterpError as error:
                yield _impossible(address.name, [address], error)


def _impossible(name: str, addresses: Sequence[Address], error: InterpError) -> Check:
    return Check(
        identity=f"{name} can be written ({one_line(error)})",
        layer=addresses[0].layer if len(addresses) == 1 else None,
        proves=(),
        error=float("inf"),
        control=None,
        tolerance=0.0,
        concerns=map(str, addresses),
    )


def _written(profile: ModelProfile, address: Address) -> bool:
    spec = profile.specs[address.name]
    return spec.positional and not address.coordinates and profile.write_refusal(address) is None


def _first_of_each_kind(facts: ModelFacts) -> set[int]:
    kinds: dict[object, int] = {}
    for layer in facts.layers:
        kinds.setdefault(attrs.evolve(layer, index=0), layer.index)
    return set(kinds.values())


def _harmless(here: Capture, zeros: Mapping[Address, Add], sound: Sequence[Address]) -> Iterator[Check]:
    """All at once; point by point, to name the culprits, only if that changes something."""
    last = here.model.facts.last_layer
    wanted = (Address("lm_head"), Address("final_norm"), Address("resid_post", last), Address("resid_streams", last))
    end = next((address for address in wanted if address in sound), None)
    if end is None:
        return
    together = _zeroed(here, "every writable point", zeros, end)
    if not together.fails:
        yield together
        return
    for name in dict.fromkeys(address.name for address in zeros):
        yield _zeroed(here, name, {a: zero for a, zero in zeros.items() if a.name == name}, end)


def _zeroed(here: Capture, name: str, zeros: Mapping[Address, Add], end: Address) -> Check:
    plain = here.rows[end]
    try:
        rows = run_with_cache(here.model, here.tokens, [end], steering=list(zeros.values()))[end][0]
    except InterpError as error:
        return _impossible(name, list(zeros), error)
    return Check(
        identity=f"adding zero to {name} changes nothing",
        layer=None,
        proves=(),
        error=apart(rows, plain),
        control=apart(rows.roll(1, 0), plain),
        tolerance=exactness(here.model.profile),
        concerns=map(str, zeros),
    )


def _landed(here: Capture, address: Address, sound: Sequence[Address], tolerance: float) -> Iterator[Check]:
    import torch

    at, plain = len(here.tokens) // 2, here.rows[address]
    width = int(torch.Size(here.model.profile.shape(address)).numel())
    before, behind = _sides(here, address, sound)
    # Not constant, so that no softmax or norm takes it for nothing; large against what is there, and no overflow.
    size = float(plain.double().square().mean().sqrt()) or 1.0
    vector = (torch.linspace(-3.0, 5.0, width) * size).to(plain.dtype)
    with steer(here.model, Add(address, vector), positions=[at]):
        found = run_with_cache(here.model, here.tokens, list(dict.fromkeys([address, *before, *behind])))
    expected = plain.clone()
    expected[at] += vector.reshape(expected[at].shape)
    yield Check(
        identity=f"what is added to {address.name} at a position is read there, and nowhere else",
        layer=address.layer,
        proves=(),
        error=difference(found[address][0], expected),
        control=difference(plain, expected),
        tolerance=5 * tolerance,
        concerns=(address.name,),
    )
    if behind:
        yield _downstream(here, address, at, found, before, behind)


def _downstream(
    here: Capture, address: Address, at: int, found: Cache, before: list[Address], behind: list[Address]
) -> Check:
    def moved(a: Address, rows: slice) -> float:
        return apart(found[a][0][rows], here.rows[a][rows])

    facts = here.model.facts
    causal = address.layer is None or facts.layers[address.layer].causal
    untouched = [moved(a, slice(None)) for a in before]
    untouched += [moved(a, slice(0, at)) for a in behind if causal]
    changed = max(moved(a, slice(at, None)) for a in behind)
    probs = here.rows.get(Address("attn_probs", address.layer)) if address.name in _OF_KEYS else None
    # Of a key that no query looks at, nothing is carried on that would not be lost in rounding.
    unseen = probs is not None and float(probs[..., at:, at].max()) < _LOOKED_AT
    return Check(
        identity=f"a write at {address.name} changes what lies behind it, from its position on, and nothing else",
        layer=address.layer,
        proves=(),
        error=max(untouched, default=0.0) if changed or unseen else float("inf"),
        control=changed,
        tolerance=exactness(here.model.profile),
        concerns=(address.name,),
    )


def _sides(here: Capture, address: Address, sound: Sequence[Address]) -> tuple[list[Address], list[Address]]:
    """Captured points that a write must leave alone, and the nearest ones that it must change."""
    if address.name in _BEHIND:
        target = Address(*_BEHIND[address.name])
        return [], [target] if target in sound else []
    stage = _STAGE[address.name]
    block = [a for a in sound if a.layer == address.layer and a.name in _STAGE and not a.coordinates]
    # Where nothing but weights stand between two points they may be one tensor, and a write is seen at both.
    before = [a for a in block if _STAGE[a.name] < stage and not _alike(here.rows[a], here.rows[address])]
    if here.model.facts.shared_key_value:
        before = [a for a in before if a.name != "value"]  # It is made of the key.
    if stage >= _STAGE["mlp_in"] and not any(a.name == "resid_mid" for a in block):
        # Only where a residual lies between the two, attention is known to come before the MLP.
        before = [a for a in before if a.name == "resid_pre" or a.name.startswith("mlp")]
    behind = [a for a in block if _STAGE[a.name] > stage and a.name in ("z", "mlp_out", "resid_post")]
    following = Address("resid_pre", (address.layer or 0) + 1)
    ends = [a for a in (following, Address("final_norm")) if a in sound]
    return before, behind or ends[:1]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return fit_gain(one.double(), other.double(), centred=True)[0] <= tolerance_of(other.dtype)
