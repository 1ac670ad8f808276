"""Capture over a whole data set, to shards on disk: constant memory, and whatever ends it, it goes on where it was.

Texts are taken in the order of the input, in batches and shards of fixed numbers of texts, so what a shard holds does
not depend on where an earlier run ended. A shard is on disk before the index names it; the index is replaced at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from interp_core.cancellation import check_cancelled
from interp_core.errors import RequestError
from interp_core.functions import readable_addresses, run_with_cache
from interp_core.harvest_index import INDEX, LOCK, Index, ShardRecord, clean, foreign, shard_name
from interp_core.harvest_reader import Harvest
from interp_core.harvest_settings import Plan, read_plan
from interp_core.harvest_shard import OpenShard, Shard
from interp_core.harvest_texts import Chunk, Reading, Source
from interp_core.steering import Steering, active_steering, as_steering, writes_for
from interp_core.tokens import select_positions

if TYPE_CHECKING:
    from interp_core.cache import Cache
    from interp_core.model import InterpModel

__all__ = ["harvest"]


def harvest(
    model: InterpModel,
    dataset_or_texts: Any,
    points: Sequence[Any],
    out_dir: str | Path,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    positions: Any = None,
    shard_size: int | None = None,
    dtype: Any = None,
    steering: Any = None,
    column: str = "text",
    add_special_tokens: bool = True,
    resume: bool = True,
    progress: bool = True,
) -> Harvest:
    """Capture ``points`` of every text into a folder of safetensors files with an index.

    One shard is held in memory, never more, however many texts there are. A run that was ended by anything, a kill
    included, is continued by the same call: finished shards are kept, and the rest gives the same bytes as a run
    that nothing ended.

    Args:
        model: the model, on any backend that captures.
        dataset_or_texts: texts or rows of token ids, or records with one of them under ``column``: a list, an iterator,
            a data set of Hugging Face ``datasets``, an open text file, or the ``Path`` of a file with one text a line
            (``.jsonl``: one JSON text, list of ids or record a line). A run that continues is given all of them again.
        points: addresses; ranges expand.
        out_dir: the folder; made if it is not there.
        batch_size: texts of one forward, in the order of the input.
        max_length: tokens after which a text is cut; the index counts how many were. ``None`` cuts nothing, and a text
            over the model's length is refused.
        positions: absolute positions, a slice, or ``"last"``, of each text; ``None`` for all.
        shard_size: texts of one file. ``None``: as many batches as keep a file of full-length texts within 512 MiB of
            float32, at most 1,024 texts.
        dtype: dtype of floating tensors on disk; ``None`` for the model's.
        steering: operations during every forward, after those of surrounding ``steer`` blocks.
        column: of records, the entry to take.
        add_special_tokens: whether texts get the tokenizer's own special tokens.
        resume: continue what is in the folder. If not, a folder that holds a harvest is refused.
        progress: show a bar on standard error.

    Returns:
        The harvest, opened: ``h.rows("resid_post.3")`` gives ``[rows, *axes]`` per shard, ``h[i]`` the cache of text i.

    Raises:
        AddressError, CapabilityUnsupported: as :func:`run_with_cache`.
        RequestError: a setting or a text is not valid; the folder holds something else, or a harvest with other
            settings or texts; another process is writing to it. What is there stays. Inputs that can be read twice
            (lists, data sets, paths) are checked to the end before any work.
        ModelUnavailable: there are texts and no tokenizer, or the folder's index or shards are spoiled.
    """
    addresses = readable_addresses(model, points)
    given = () if steering is None else (as_steering(model.profile, steering),)
    steerings = (*active_steering(model), *given)
    plan = read_plan(
        model,
        addresses,
        steerings,
        positions=positions,
        batch_size=batch_size,
        shard_size=shard_size,
        max_length=max_length,
        dtype=dtype,
    )
    folder = Path(out_dir)
    source = Source.of(dataset_or_texts)
    _begun(folder, plan, resume=resume)

    def check(length: int) -> None:
        select_positions(positions, length)
        writes_for(steerings, length)

    reading = Reading(
        model=model, max_length=plan.max_length, column=column, add_special_tokens=add_special_tokens, check=check
    )
    count = _counted(reading, source, plan) if source.again else source.count
    # The first texts are read, and checked, before a folder is made for them.
    chunks = reading.chunks(source, plan.shard_size)
    first = next(chunks, None)
    if first is None:
        raise RequestError("there is no text to harvest")
    run = _Run(model, plan, folder, given[0] if given else None)
    with _locked(folder):
        run.over(itertools.chain([first], chunks), _begun(folder, plan, resume=resume), count, progress=progress)
    return Harvest(folder)


class _Run:
    """One call of :func:`harvest`, with everything checked that can be before it runs."""

    def __init__(self, model: InterpModel, plan: Plan, folder: Path, steering: Steering | None) -> None:
        self.model, self.plan, self.folder, self.steering = model, plan, folder, steering

    def over(self, chunks: Iterator[Chunk], begun: Index | None, count: int | None, *, progress: bool) -> None:
        """Go through all texts, and capture those that are not in the folder yet."""
        from tqdm.auto import tqdm

        index = begun or Index(settings=self.plan.record)
        clean(self.folder, len(index.shards))
        if begun is None:
            index.write(self.folder)
        seen = 0
        with tqdm(total=count, desc="harvest", unit="text", disable=not progress) as bar:
            for number, chunk in enumerate(chunks):
                check_cancelled()
                if number < len(index.shards):
                    self._require_same(index, number, chunk)
                    bar.update(len(chunk.rows))
                elif index.complete:
                    raise RequestError(f"{self.folder} holds a complete harvest of {seen} texts; this has more")
                else:
                    index = self._capture(index, chunk, bar)
                seen += len(chunk.rows)
        if seen < index.total("texts"):
            raise RequestError(f"{self.folder} holds {index.total('texts')} texts already; this input has {seen}")
        if not index.complete:
            evolve(index, complete=True).write(self.folder)

    def _capture(self, index: Index, chunk: Chunk, bar: Any) -> Index:
        """One more shard, in the folder and in its index."""
        shard = self._shard(chunk.rows)
        for rows in _batches(chunk.rows, self.plan.batch_size):
            check_cancelled()
            shard.add(self._run(rows))
            bar.update(len(rows))
        name = shard_name(len(index.shards))
        record = ShardRecord(
            file=name,
            first=chunk.first,
            texts=len(chunk.rows),
            tokens=sum(map(len, chunk.rows)),
            rows=sum(shard.rows),
            truncated=chunk.truncated,
            inputs=chunk.digest,
            bytes=shard.write(self.folder / name, index.fingerprint),
        )
        index = index.plus(record, shard.points())
        index.write(self.folder)
        return index

    def _run(self, rows: Sequence[tuple[int, ...]]) -> Cache:
        return run_with_cache(
            self.model,
            [list(row) for row in rows],
            self.plan.addresses,
            positions=self.plan.positions,
            steering=self.steering,
        )

    def _require_same(self, index: Index, number: int, chunk: Chunk) -> None:
        """Refuse other texts than those of a finished shard; and, at the first one, another model."""
        record = index.shards[number]
        if (record.texts, record.inputs, record.truncated) != (len(chunk.rows), chunk.digest, chunk.truncated):
            last = record.first + max(record.texts, len(chunk.rows)) - 1
            raise RequestError(
                f"{self.folder} holds a harvest of other texts: texts {record.first} to {last} are not those of "
                f"{record.file} ({record.texts} texts of {record.tokens} tokens, now {len(chunk.rows)} of "
                f"{sum(map(len, chunk.rows))})"
            )
        shard = OpenShard.open(self.folder / record.file, index.fingerprint, record.bytes)
        if number == 0:
            self._require_same_model(shard, chunk)

    def _require_same_model(self, shard: OpenShard, chunk: Chunk) -> None:
        """Compute the first batch again: weights, callables and machines have no settings to be compared by."""
        rows = next(_batches(chunk.rows, self.plan.batch_size))
        again = self._shard(rows)
        again.add(self._run(rows))
        unlike = shard.unlike(again)
        if unlike:
            raise RequestError(
                f"{self.folder} holds a harvest that this model does not give: of its first texts {unlike}. Its "
                "weights, or what an Apply calls, have changed; take another folder"
            )

    def _shard(self, rows: Sequence[tuple[int, ...]]) -> Shard:
        where = self.plan.positions
        positions = None if where is None else [select_positions(where, len(row)) or () for row in rows]
        return Shard(self.plan.addresses, rows, positions, self.plan.dtype)


def _begun(folder: Path, plan: Plan, *, resume: bool) -> Index | None:
    """The harvest that is in the folder, if there is one, and if it may be continued."""
    others = foreign(folder)
    if others:
        shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        raise RequestError(f"{folder} holds something else than a harvest ({shown}): name a new or empty folder")
    if not (folder / INDEX).is_file():
        return None
    index = Index.read(folder)
    if not resume:
        raise RequestError(
            f"{folder} holds a harvest of {index.total('texts')} texts, and resume=False does not continue it: name "
            "another folder, or remove this one yourself"
        )
    index.require_settings(plan.record, folder)
    return index


def _counted(reading: Reading, source: Source, plan: Plan) -> int:
    """Go through all texts once, so that a bad one is found before any work; their number."""
    found = 0
    for chunk in reading.chunks(source, plan.shard_size):
        check_cancelled()
        found += len(chunk.rows)
    return found


def _batches(rows: Sequence[tuple[int, ...]], size: int) -> Iterator[Sequence[tuple[int, ...]]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process only. The lock goes with the process, also with a killed one."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise RequestError(f"another run is harvesting into {folder}") from error
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error}") from error
    try:
        yield
    finally:
        lock.release()
