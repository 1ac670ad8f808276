"""What is written: a zero changes nothing, a large vector changes exactly what it should, and nobody else's request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interp_core.address import Address
from interp_core.checks import apart, difference
from interp_core.operations import Ablate, Add, Replace
from interp_core.testing.served import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache

__all__ = ["company_faults", "landing_faults", "zero_faults"]

_AT = 2
"""The position that is written: with others on both sides of it."""


def zero_faults(subject: Subject) -> Iterator[str]:
    """Adding zero to every writable address, one at a time, changes no logit."""
    import torch

    ends = subject.ends()
    plain = subject.model.run_with_cache(subject.prompts[0], ends)
    for address in subject.writable():
        if not subject.profile.specs[address.name].positional:
            yield from _matrix_faults(subject, address, plain)
            continue
        steering = [Add(address, torch.zeros(_width(subject, address)))]
        same = subject.model.run_with_cache(subject.prompts[0], ends, steering=steering)
        for end in ends:
            if apart(same[end], plain[end]) > subject.exact:
                yield f"adding zero to {address} changes {end}"


def _matrix_faults(subject: Subject, address: Address, plain: Cache) -> Iterator[str]:
    """A matrix over positions: its own values in its place are no change, and zeros from a position on are one."""
    if subject.profile.read_refusal(address) is not None:
        return
    prompt, ends = subject.prompts[0], subject.ends()
    own = subject.model.run_with_cache(prompt, [address])[address][0]
    same = subject.model.run_with_cache(prompt, ends, steering=[Replace(address, own)])
    with subject.model.steer(Ablate(address), positions=[_AT]):
        without = subject.model.run_with_cache(prompt, ends)
    for end in ends:
        if apart(same[end], plain[end]) > 2e-5:
            yield f"putting its own values in place of {address} changes {end}"
        if apart(without[end][:, :_AT], plain[end][:, :_AT]) > 2e-5:
            yield f"zeros at {address} at position {_AT} change {end} before that position"
    if ends and all(apart(without[end][:, _AT:], plain[end][:, _AT:]) <= 1e-6 for end in ends):
        yield f"zeros at {address} at position {_AT} change nothing in {ends[0]}"


def landing_faults(subject: Subject, tolerance: float) -> Iterator[str]:
    """A large vector lands at the position, and the element, that were named, and reaches the logits from there on."""
    for address in subject.writable():
        if subject.profile.specs[address.name].positional:
            yield from _landed(subject, address, tolerance)
            if address.layer in (None, 0):
                for part in subject.coordinates(address):
                    yield from _landed(subject, part, tolerance)


def _landed(subject: Subject, address: Address, tolerance: float) -> Iterator[str]:
    whole = address.bare() if subject.profile.read_refusal(address.bare()) is None else address
    reads = list(dict.fromkeys([*([whole] if subject.profile.read_refusal(whole) is None else []), *subject.ends()]))
    rows = subject.rows()
    plain = {a: rows[a] for a in reads}
    width = _width(subject, address)
    vector = _vector(width, float(plain[reads[0]].abs().max()) if reads else 1.0)
    with subject.model.steer(Add(address, vector), positions=[_AT]):
        cache = subject.model.run_with_cache(subject.prompts[0], reads)
    changed = {a: cache[a][0] for a in reads}
    if whole in reads and subject.profile.read_refusal(whole) is None:
        expected = plain[whole].clone()
        _part(subject, address, expected)[_AT] += vector.reshape(_part(subject, address, expected)[_AT].shape)
        if difference(changed[whole][_AT], expected[_AT]) > tolerance:
            yield f"a vector added to {address} at position {_AT} is not what is read there afterwards"
        others = [i for i in range(len(expected)) if i != _AT]
        if apart(changed[whole][others], plain[whole][others]) > subject.exact:
            yield f"a vector added to {address} at position {_AT} changes it at other positions"
    for end in subject.ends():
        if apart(changed[end][:_AT], plain[end][:_AT]) > subject.exact:
            yield f"a vector added to {address} at position {_AT} changes {end} before that position"
    if subject.ends() and all(apart(changed[e][_AT:], plain[e][_AT:]) <= 1e-6 for e in subject.ends()):
        yield f"a large vector added to {address} at position {_AT} changes nothing in {subject.ends()[0]}"


def _part(subject: Subject, address: Address, whole: Tensor) -> Tensor:
    """The view of a whole point's rows that ``address`` names."""
    from interp_core.address import COORDINATE_AXES

    if not address.coordinates or list(whole.shape[1:]) == list(subject.profile.shape(address)):
        return whole
    axes, view = list(subject.profile.specs[address.name].axes), whole
    for name, index in address.coordinates:
        at = axes.index(COORDINATE_AXES[name])
        axes.pop(at)
        view = view.select(at + 1, index)
    return view


def company_faults(subject: Subject) -> Iterator[str]:
    """A request that is run beside a steered one gives what it gives alone."""
    from interp_core.requests import ForwardRequest, Read
    from interp_core.steering import as_steering, writes_for

    ends = subject.ends()
    reads = tuple(Read(address=a) for a in ends)
    address = next((a for a in subject.writable() if a.name in ("resid_pre", "embeddings", "attn_in")), None)
    if address is None:
        return
    prompt, other = subject.prompts[0], subject.other_prompt
    operation = Add(address, _vector(_width(subject, address), float(subject.rows()[ends[0]].abs().max())))
    writes = writes_for([as_steering(subject.profile, operation)], len(prompt))
    steered = ForwardRequest(token_ids=tuple(prompt), reads=reads, writes=writes)
    plain = ForwardRequest(token_ids=tuple(other), reads=reads)
    first, second = subject.model.session.run([steered, plain])
    here, there = subject.rows(prompt), subject.rows(other)
    for end in ends:
        if apart(second.rows[end], there[end]) > 2e-5:
            yield f"steering one request at {address} changes {end} of the request beside it"
        if apart(first.rows[end], here[end]) <= 1e-6:
            yield f"steering at {address} is lost when the request has company"


def _vector(width: int, size: float) -> Tensor:
    """Not constant, so that no softmax or norm takes it for nothing; and large against what it is added to."""
    import torch

    return torch.linspace(-3.0, 5.0, width) * max(size, 1.0) if width > 1 else torch.full((1,), 5.0 * max(size, 1.0))


def _width(subject: Subject, address: Address) -> int:
    import torch

    return int(torch.Size(subject.profile.shape(address)).numel())
