"""The index of a harvest: one JSON file that says what is in the folder, and is replaced whole or not at all.

It holds nothing of when or where it was made: equal inputs and settings give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import evolve, field, frozen

from interp_core.converters import as_tuple
from interp_core.durable import partial_files, replacing
from interp_core.errors import ModelUnavailable, RequestError

__all__ = ["INDEX", "LOCK", "Index", "ShardRecord", "clean", "foreign", "shard_name"]

INDEX: Final = "index.json"
LOCK: Final = ".lock"
_FORMAT: Final = "interp-harvest 1"
_SHARD: Final = re.compile(r"shard-\d{6}\.safetensors")


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.safetensors"


@frozen(kw_only=True)
class ShardRecord:
    """One shard.

    Attributes:
        file: its name in the folder.
        first: number of its first text.
        texts, tokens, rows: how many are in it.
        truncated: how many of its texts were cut.
        inputs: SHA-256 of its token ids.
        bytes: size of the file.
    """

    file: str
    first: int
    texts: int
    tokens: int
    rows: int
    truncated: int
    inputs: str
    bytes: int


@frozen(kw_only=True)
class Index:
    """What a folder holds.

    Attributes:
        settings: everything that the numbers depend on but the texts.
        points: per address its ``dtype``, its ``axes`` (sizes behind the rows), and whether it is ``pairwise``;
            empty before the first shard.
        shards: finished shards, in order.
        complete: whether the input has no more texts.
    """

    settings: Mapping[str, Any]
    points: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    shards: tuple[ShardRecord, ...] = field(default=(), converter=as_tuple)
    complete: bool = False

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the settings; every shard carries it."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()

    def total(self, what: str) -> int:
        """Sum of ``texts``, ``tokens``, ``rows``, ``truncated`` or ``bytes`` over the shards."""
        return sum(getattr(shard, what) for shard in self.shards)

    def plus(self, shard: ShardRecord, points: Mapping[str, Mapping[str, Any]]) -> Index:
        """The same with one more shard."""
        return evolve(self, shards=(*self.shards, shard), points=points)

    def write(self, folder: Path) -> None:
        """Replace the folder's index.

        Raises:
            RequestError: it cannot be written.
        """
        totals = {name: self.total(name) for name in ("texts", "tokens", "rows", "truncated", "bytes")}
        record = {"format": _FORMAT, "complete": self.complete, **totals, "fingerprint": self.fingerprint}
        record |= {"settings": self.settings, "points": self.points, "shards": list(map(attrs.asdict, self.shards))}
        try:
            with replacing(folder / INDEX) as part:
                part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{folder} cannot be written: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of ``folder``.

        Raises:
            ModelUnavailable: there is none, or it is spoiled or another program's.
        """
        path = folder / INDEX
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"{path} cannot be read as the index of a harvest: {error}") from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            found = record.get("format") if isinstance(record, dict) else None
            raise ModelUnavailable(f"{path} is no index of a harvest that this release reads (its format: {found!r})")
        try:
            shards = [ShardRecord(**shard) for shard in record["shards"]]
            index = cls(shards=shards, **{name: record[name] for name in ("settings", "points", "complete")})
            if index.fingerprint != record["fingerprint"]:
                raise ValueError("its settings are not those of its fingerprint")
            if [s.first for s in shards] != [sum(s.texts for s in shards[:n]) for n in range(len(shards))]:
                raise ValueError("its shards do not follow each other")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelUnavailable(f"{path} is a spoiled index of a harvest: {error}") from error
        return index

    def require_settings(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Refuse other settings than those of the harvest that has begun.

        Raises:
            RequestError: it names what differs.
        """
        old, new = dict(_leaves(self.settings)), dict(_leaves(settings))
        differing = [
            f"{name} {_shown(old.get(name))}, now {_shown(new.get(name))}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if differing:
            raise RequestError(
                f"{folder} holds a harvest with other settings, which is not continued: {'; '.join(differing)}. "
                "Take the same settings again, or another folder"
            )


def foreign(folder: Path) -> list[str]:
    """Names in ``folder`` that no harvest made: everything, where there is no index."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        return [folder.name]
    ours = {file.name for file, name in partial_files(folder).items() if _ours(name)}
    if (folder / INDEX).is_file():
        return []
    return sorted(file.name for file in folder.iterdir() if file.name not in {*ours, LOCK})


def clean(folder: Path, shards: int) -> None:
    """Remove what a killed run left: temporary files, and a shard that the index does not know yet."""
    known = {shard_name(number) for number in range(shards)}
    for file, name in partial_files(folder).items():
        if _ours(name):
            file.unlink()
    for file in list(folder.iterdir()):
        if _SHARD.fullmatch(file.name) and file.name not in known:
            file.unlink()


def _ours(name: str) -> bool:
    return name == INDEX or _SHARD.fullmatch(name) is not None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
