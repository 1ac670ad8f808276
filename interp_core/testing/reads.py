"""What is read has the declared shape, is the caller's own, and is the same however it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from interp_core.address import Address
from interp_core.checks import apart
from interp_core.discovery import one_line
from interp_core.testing.served import Subject

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batch_faults", "copy_faults", "selection_faults", "shape_faults", "vocabulary_faults"]


def shape_faults(subject: Subject, dtype: str) -> Iterator[str]:
    """Every readable address is read, with its declared axes, in the model's dtype, and with finite values."""
    import torch

    try:
        rows: Mapping[Address, Tensor] = subject.rows()
    except Exception:  # noqa: BLE001 - asked again one by one, to name the culprits
        failing: dict[str, list[str]] = {}
        for address, error in _unreadable(subject):
            failing.setdefault(error, []).append(str(address))
        yield from (f"{', '.join(names)}: declared, and reading fails: {e}" for e, names in failing.items())
        return
    positions = len(subject.prompts[0])
    for address, value in rows.items():
        spec, sizes = subject.profile.specs[address.name], subject.profile.shape(address)
        wanted = [positions, *sizes] if spec.positional else [positions if size == 0 else size for size in sizes]
        given = list(value.shape)
        if not spec.positional and len(given) == len(wanted) and given[-1] > wanted[-1]:
            wanted[-1] = given[-1]  # compressed entries stand behind the tokens
        if given != wanted:
            yield f"{address} is {given}; its axes {', '.join(spec.axes)} say {wanted}"
        if spec.integer == value.is_floating_point() or (not spec.integer and value.dtype != getattr(torch, dtype)):
            yield f"{address} is of dtype {value.dtype}; declared are {'whole numbers' if spec.integer else dtype}"
        masked = not spec.positional and address.name == "attn_scores"
        if not bool((value.isfinite() | (value == float("-inf")) if masked else value.isfinite()).all()):
            yield f"{address} holds values that are not finite"
        if value.is_floating_point() and value.requires_grad:
            yield f"{address} requires a gradient that nobody asked for"


def _unreadable(subject: Subject) -> Iterator[tuple[Address, str]]:
    for address in subject.readable():
        try:
            subject.model.run_with_cache(subject.prompts[0], [address])
        except Exception as error:  # noqa: BLE001 - becomes the finding
            yield address, one_line(error)


def selection_faults(subject: Subject) -> Iterator[str]:
    """Coordinates and positions give slices of the whole, and asking for less gives the same."""
    whole = subject.rows()
    for address, value in whole.items():
        for part in subject.coordinates(address):
            got = subject.model.run_with_cache(subject.prompts[0], [part])[part][0]
            yield from _unequal(f"{part}, against the slice of {address}", got, _slice(subject, part, value), subject)
    chosen = [0, len(subject.prompts[0]) - 1]
    cache = subject.model.run_with_cache(subject.prompts[0], list(whole), positions=chosen)
    for address, value in whole.items():
        if subject.profile.specs[address.name].positional:
            where = f"{address} at positions {chosen}, against those rows of the whole"
            yield from _unequal(where, cache[address][0], value[chosen], subject)


def _slice(subject: Subject, part: Address, value: Tensor) -> Tensor:
    spec = subject.profile.specs[part.name]
    name, index = part.coordinates[-1]
    from interp_core.address import COORDINATE_AXES

    taken = [COORDINATE_AXES[n] for n, _ in part.coordinates[:-1]]
    axes = list(spec.axes)
    for axis in taken:
        axes.remove(axis)
    at = axes.index(COORDINATE_AXES[name])
    return value.select(at + 1 if spec.positional else at, index)


def _unequal(what: str, got: Tensor, want: Tensor, subject: Subject) -> Iterator[str]:
    if got.shape != want.shape:
        yield f"{what}: {list(got.shape)} is not {list(want.shape)}"
    elif (error := apart(got, want)) > subject.exact:
        yield f"{what}: they differ by {error:.1e}"


def batch_faults(subject: Subject, tolerance: float) -> Iterator[str]:
    """Prompts of unequal lengths give what each gives alone, and zeros behind the shorter ones."""
    addresses = subject.readable()
    batch = subject.model.run_with_cache(subject.prompts, addresses)
    for i, prompt in enumerate(subject.prompts):
        alone = subject.cache(prompt)
        for address in addresses:
            positional, n = subject.profile.specs[address.name].positional, len(prompt)
            if positional:
                got, rest = batch[address][i, :n], batch[address][i, n:]
            else:
                got, rest = batch[address][i, ..., :n, :n], batch[address][i, ..., n:, :]
            want = alone[address][0] if positional else alone[address][0][..., :n]
            if got.shape != want.shape or apart(got, want) > tolerance:
                yield f"{address} of prompt {i} of {len(prompt)} tokens is another in a batch than alone"
            if bool(rest.any()):
                yield f"{address} is not zero behind the {len(prompt)} tokens of prompt {i}"


def copy_faults(subject: Subject) -> Iterator[str]:
    """Overwriting a result changes no other result, and no later run."""
    addresses = [a for a in subject.readable() if not subject.profile.specs[a.name].integer]
    prompt = subject.prompts[0]
    first = subject.model.run_with_cache(prompt, addresses)
    kept = {address: first[address].clone() for address in addresses}
    for address in addresses:
        first[address].fill_(7.0)
        changed = [b for b in addresses if b is not address and not _same(first[b], kept[b])]
        if changed:
            yield f"overwriting the result of {address} changes that of {', '.join(map(str, changed))}"
        first[address].copy_(kept[address])
    for address in addresses:
        first[address].fill_(7.0)
    again = subject.model.run_with_cache(prompt, addresses)
    for address in addresses:
        if apart(again[address], kept[address]) > subject.exact:
            yield f"overwriting results changes {address} of the next run"


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one == other).all())


def vocabulary_faults(subject: Subject) -> Iterator[str]:
    """The last id of the vocabulary runs, and the logits are as many as the facts say."""
    size = subject.profile.facts.vocab_size
    try:
        cache: Any = subject.model.run_with_cache([size - 1, 0, size - 1], subject.ends())
    except Exception as error:  # noqa: BLE001 - becomes the finding
        yield f"a prompt with the last id of the vocabulary, {size - 1}, fails: {one_line(error)}"
        return
    if "lm_head" in cache and cache["lm_head"].shape[-1] != size:
        yield f"lm_head has {cache['lm_head'].shape[-1]} logits; the facts say {size}"
