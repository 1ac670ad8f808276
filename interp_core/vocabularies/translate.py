"""From a name to an address and back, by the tables and the facts of one model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from interp_core.address import Address, parse_address
from interp_core.errors import AddressError, CapabilityUnsupported, RequestError, nearest, unknown_name
from interp_core.facts import LayerFacts
from interp_core.profile import ModelProfile
from interp_core.vocabularies.conditions import CONDITIONS
from interp_core.vocabularies.interp_engine import INTERP_ENGINE
from interp_core.vocabularies.nnsight import NNSIGHT_TREES, NNTERP
from interp_core.vocabularies.records import Condition, Name, NotAPoint, Vocabulary, first_failing, pattern
from interp_core.vocabularies.transformer_lens import TRANSFORMER_LENS

__all__ = ["VOCABULARIES", "from_address", "to_address"]

_Row = TypeVar("_Row", Name, NotAPoint)

VOCABULARIES: Final[Mapping[str, tuple[Vocabulary, ...]]] = MappingProxyType(
    {
        "transformer_lens": (TRANSFORMER_LENS,),
        "nnterp": (NNTERP,),
        "nnsight": NNSIGHT_TREES,
        "interp_engine": (INTERP_ENGINE,),
    }
)
"""The tables by library; several where names depend on the module tree."""


def to_address(name: str, library: str, profile: ModelProfile) -> Address:
    """The address of the tensor that ``name`` means in another library, on this model.

    Args:
        name: a name there, such as ``blocks.3.hook_resid_post`` or ``layers_output[3]``.
        library: one of ``LIBRARIES``.
        profile: the model (``inspect_model(...)`` or ``model.profile``).

    Raises:
        RequestError: the library is not known, or ``name`` is not a string.
        AddressError: the name is not known (with the likely one), or names a layer that is not there.
        CapabilityUnsupported: the name is known, and no point of this model has that tensor; says what is near.
    """
    if not isinstance(name, str):
        raise RequestError(f"a name is a string, not {type(name).__name__}")
    vocabulary = _vocabulary(library, profile)
    if vocabulary.addresses:
        return _from_their_address(name, vocabulary, profile)
    return _from_their_name(name, vocabulary, profile)


def from_address(address: object, library: str, profile: ModelProfile) -> str:
    """The name that another library has for an address of this model.

    Raises:
        RequestError: the library is not known.
        AddressError: the address does not exist on this model, or has a coordinate that their name cannot hold.
        CapabilityUnsupported: this model has no such tensor, or they have no name for it; says what is near.
    """
    vocabulary = _vocabulary(library, profile)
    ours = profile.address(address)
    if ours.module_path is not None:
        return _module_name(ours, vocabulary)
    kept = [f"{name}-{index}" for name, index in ours.coordinates if vocabulary.addresses and name == "stream"]
    if len(kept) < len(ours.coordinates):
        raise AddressError(
            f"{ours}: a name of {vocabulary.title} has a place for a layer and for no coordinate; translate "
            f"{str(ours.bare())!r}, and index the tensor"
        )
    if not kept:
        _refuse_absent(ours, str(ours), "", profile)
    return ".".join([_their_name(ours, vocabulary, profile), *kept])


def _vocabulary(library: str, profile: ModelProfile) -> Vocabulary:
    if library not in VOCABULARIES:
        raise RequestError(unknown_name("library", str(library), VOCABULARIES))
    facts = profile.facts
    for vocabulary in VOCABULARIES[library]:
        if not vocabulary.families or (facts.model_type in vocabulary.families and not facts.text_path):
            return vocabulary
    raise CapabilityUnsupported(
        capability="read_point",
        why=f"names of {library} are module paths, and the module tree of this family is not in its tables",
        instead="path.<dotted.module.path>, which reads the output of any module on eager",
        architecture=profile.architecture_name,
    )


def _from_their_address(name: str, vocabulary: Vocabulary, profile: ModelProfile) -> Address:
    address = parse_address(name)
    if address.module_path is not None:
        return address
    foreign = [part for part, _ in address.coordinates if part != "stream"]
    if foreign:
        raise AddressError(f"{name!r}: an address of {vocabulary.title} has no coordinate {foreign[0]!r}")
    found = _from_their_name(str(address.bare()), vocabulary, profile, whole=not address.coordinates)
    return profile.address(Address(found.name, found.layer, address.coordinates))


def _from_their_name(name: str, vocabulary: Vocabulary, profile: ModelProfile, *, whole: bool = True) -> Address:
    failed: tuple[Name, Condition] | None = None
    for row, number in _matches(name, vocabulary.names, vocabulary):
        layer = _layer(name, number, profile)
        failing = first_failing(row.when, CONDITIONS, profile.facts, layer)
        if failing is None and row.point in profile.specs:
            address = Address(row.point, number)
            if whole:
                _refuse_absent(address, name, row.near, profile)
            return address
        if failing is not None and failed is None:
            failed = (row, failing)
    for other, number in _matches(name, vocabulary.others, vocabulary):
        _layer(name, number, profile)
        raise _refusal(name, other.why, other.near)
    if failed is not None:
        row, failing = failed
        raise _refusal(name, failing.fails, row.near or _ask(profile), profile)
    raise AddressError(_unknown(name, vocabulary))


def _matches(name: str, rows: tuple[_Row, ...], vocabulary: Vocabulary) -> list[tuple[_Row, int | None]]:
    found: list[tuple[_Row, int | None]] = []
    for row in rows:
        form = pattern(row.name, flexible=vocabulary.flexible)
        for spelling in vocabulary.spellings(name):
            match = form.fullmatch(spelling)
            if match is not None:
                found.append((row, int(match["layer"]) if "layer" in form.groupindex else None))
                break
    return found


def _layer(name: str, number: int | None, profile: ModelProfile) -> LayerFacts | None:
    if number is None:
        return None
    if number >= profile.facts.n_layers:
        raise AddressError(f"{name!r}: the layers of this model are 0 to {profile.facts.n_layers - 1}")
    return profile.facts.layers[number]


def _their_name(ours: Address, vocabulary: Vocabulary, profile: ModelProfile) -> str:
    layer = None if ours.layer is None else profile.facts.layers[ours.layer]
    failed: tuple[Name, Condition] | None = None
    for row in vocabulary.named(ours.name):
        failing = first_failing(row.when, CONDITIONS, profile.facts, layer)
        if failing is None:
            return row.name.replace("{layer}", str(ours.layer))
        failed = failed or (row, failing)
    for reason in vocabulary.without(ours.name):
        if first_failing(reason.when, CONDITIONS, profile.facts, layer) is None:
            raise _refusal(str(ours), reason.why, reason.near, profile)
    if failed is not None:
        raise _refusal(
            str(ours), f"{vocabulary.title} has no name for it here: {failed[1].fails}", _ask(profile), profile
        )
    raise _refusal(str(ours), f"{vocabulary.title} has no name for it", _ask(profile), profile)


def _module_name(ours: Address, vocabulary: Vocabulary) -> str:
    if vocabulary.addresses:
        return str(ours)
    if vocabulary.module_output:
        return vocabulary.module_output.format(path=ours.module_path)
    raise _refusal(str(ours), f"{vocabulary.title} has names of its own for modules", "library='nnsight'")


def _refuse_absent(address: Address, asked: str, near: str, profile: ModelProfile) -> None:
    """Refuse what this trunk does not have, whatever the backend."""
    absent = profile.specs[address.name].absent
    reason = absent.get(None) or absent.get(address.layer)
    if reason:
        raise _refusal(asked, reason, near or _ask(profile), profile)


def _ask(profile: ModelProfile) -> str:
    return profile.capabilities["read_point"].instead


def _refusal(subject: str, why: str, near: str, profile: ModelProfile | None = None) -> CapabilityUnsupported:
    return CapabilityUnsupported(
        capability="read_point",
        why=why,
        instead=near,
        point=subject,
        architecture=None if profile is None else profile.architecture_name,
    )


def _unknown(name: str, vocabulary: Vocabulary) -> str:
    numbers = re.findall(r"(?<![A-Za-z_])\d+", name)
    layer = numbers[0] if numbers else "0"
    templates = [row.name for row in vocabulary.names] + [row.name for row in vocabulary.others]
    known = dict.fromkeys(template.replace("{layer}", layer) for template in templates)
    last = name.rpartition(".")[2]
    same_end = [candidate for candidate in known if candidate.rpartition(".")[2] == last]
    guess = nearest(name, same_end) or nearest(name, known) or nearest(name.removeprefix("model."), known)
    if guess is None and vocabulary.module_output and name.endswith(".output"):
        return (
            f"{name!r} is no name of {vocabulary.title} that is a point; path.<dotted.module.path> reads the output of "
            "any module on eager"
        )
    hint = f" Did you mean {guess!r}?" if guess else f" Names look like {', '.join(list(known)[:4])}."
    return f"unknown name {name!r} of {vocabulary.title}.{hint}"
