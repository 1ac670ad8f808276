"""The input of a harvest: texts or rows of token ids from wherever they come, read in chunks, never all at once."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from interp_core.errors import RequestError
from interp_core.tokens import read_tokens

if TYPE_CHECKING:
    from interp_core.model import InterpModel

__all__ = ["Chunk", "Reading", "Source"]


@frozen(kw_only=True)
class Source:
    """Where texts come from.

    Attributes:
        items: gives a new iterator of texts, rows of ids, or records.
        count: how many there are, or ``None`` where nobody knows before the end.
        again: whether ``items`` gives them all each time, so that they can be checked before any work.
    """

    items: Callable[[], Iterator[Any]]
    count: int | None = None
    again: bool = False

    @classmethod
    def of(cls, texts: Any) -> Source:
        """Read what the caller gave.

        Raises:
            RequestError: it is none of the forms that a harvest takes, or the file is not there.
        """
        if isinstance(texts, Path):
            if not texts.is_file():
                raise RequestError(f"{texts} is not a file of texts, one a line")
            return cls(items=lambda: _lines(texts), again=True)
        if isinstance(texts, (str, bytes)):
            raise RequestError(
                f"a harvest takes a list of texts, not one: [{texts!r}], or Path({texts!r}) for the lines of a file"
                if len(texts) < 80
                else "a harvest takes a list of texts, not one; pathlib.Path(...) stands for the lines of a file"
            )
        if isinstance(texts, Mapping):
            raise RequestError(f"a harvest takes one list of texts; this maps {', '.join(map(str, texts))}: name one")
        if isinstance(texts, (set, frozenset)):
            raise RequestError("a set has no order, so a harvest of it could not be continued; give a list")
        if isinstance(texts, io.TextIOBase):
            return cls(items=lambda: (line.rstrip("\r\n") for line in texts))
        if not isinstance(texts, Iterable):
            raise RequestError(f"a harvest takes texts or rows of token ids, not {type(texts).__name__}")
        again = isinstance(texts, Sized) and not isinstance(texts, Iterator)
        return cls(items=lambda: iter(texts), count=len(texts) if isinstance(texts, Sized) else None, again=again)


@frozen(kw_only=True)
class Chunk:
    """Texts that follow each other, as they go through the model.

    Attributes:
        first: number of the first, from 0.
        rows: token ids of each.
        truncated: how many were longer.
    """

    first: int
    rows: tuple[tuple[int, ...], ...]
    truncated: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of all token ids and where each text ends."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(array("q", (len(row), *row)).tobytes())
        return found.hexdigest()


@frozen(kw_only=True, eq=False)
class Reading:
    """How texts become rows.

    Attributes:
        model: whose tokenizer is used, and whose limits hold.
        max_length: tokens after which a text is cut; ``None`` refuses what is longer than the model takes.
        column: of records, which entry.
        add_special_tokens: whether texts get the tokenizer's own special tokens.
        check: called with each length that occurs, once; raises what is to be said of it.
    """

    model: InterpModel
    max_length: int | None
    column: str
    add_special_tokens: bool
    check: Callable[[int], None]
    _seen: set[int] = field(factory=set, init=False)

    def chunks(self, source: Source, size: int) -> Iterator[Chunk]:
        """All texts, ``size`` at a time.

        Raises:
            RequestError: one is not text or token ids, is empty, too long, or not right for the request; it says which.
            ModelUnavailable: there are texts, and the model has no tokenizer.
        """
        items, first = source.items(), 0
        while batch := list(itertools.islice(items, size)):
            rows = [self._cut(first + i, row) for i, row in enumerate(self._ids(first, batch))]
            yield Chunk(first=first, rows=tuple(row for row, _ in rows), truncated=sum(cut for _, cut in rows))
            first += len(batch)

    def _ids(self, first: int, items: Sequence[Any]) -> list[Any]:
        """Token ids of each item; texts are tokenized together."""
        values = [self._value(first + i, item) for i, item in enumerate(items)]
        texts = [value for value in values if isinstance(value, str)]
        if not texts:
            return values
        ids = self.model.to_tokens(texts, add_special_tokens=self.add_special_tokens)
        rows = iter(ids.tolist() if hasattr(ids, "tolist") else ids)
        return [next(rows) if isinstance(value, str) else value for value in values]

    def _value(self, number: int, item: Any) -> Any:
        if isinstance(item, Mapping):
            if self.column not in item:
                raise RequestError(
                    f"text {number} has no {self.column!r}, only {', '.join(map(str, item))}: name one, as in "
                    f"column={next(map(str, item), 'text')!r}"
                )
            item = item[self.column]
        if isinstance(item, str):
            if not item:
                raise RequestError(f"text {number} (counted from 0) is empty")
            return item
        values = item.tolist() if hasattr(item, "tolist") else item
        if isinstance(values, (list, tuple)) and len(values) == 1 and isinstance(values[0], (list, tuple)):
            values = values[0]  # one row as to_tokens gives it
        if not isinstance(values, (list, tuple, range)):
            raise RequestError(f"text {number} is neither text nor a list of token ids, but {item!r:.60}")
        return values

    def _cut(self, number: int, row: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
        cut = row if self.max_length is None else row[: self.max_length]
        try:
            batch = read_tokens(list(cut), self.model.facts)
            if not batch.single:
                raise RequestError("this is several rows of token ids; give each of its own")
            length = len(batch.rows[0])
            if length not in self._seen:
                self.check(length)
                self._seen.add(length)
        except RequestError as error:
            limit = self.model.facts.max_positions
            hint = "; max_length cuts texts" if limit is not None and len(cut) > limit else ""
            raise RequestError(f"text {number} (counted from 0): {error}{hint}") from error
        return batch.rows[0], len(row) > len(cut)


def _lines(path: Path) -> Iterator[Any]:
    """Lines without their ends; of a ``.jsonl`` file what they hold."""
    try:
        with path.open(encoding="utf-8", newline=None) as file:
            for number, line in enumerate(file, start=1):
                yield _record(path, number, line) if path.suffix == ".jsonl" else line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _record(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{path}, line {number} is not JSON: {error}") from error
