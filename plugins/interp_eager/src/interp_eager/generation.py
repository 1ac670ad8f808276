"""Generation with a key/value cache: one forward per token for a whole batch, reading and writing in each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from interp_core.errors import RequestError
from interp_core.requests import ForwardRequest, ForwardResult, Sampling, Step
from interp_eager.batching import aligned
from interp_eager.carried import Carried
from interp_eager.collect import Chunk, Collector
from interp_eager.sampling import chosen, most_likely

if TYPE_CHECKING:
    from interp_eager.backend import EagerBackend
    from interp_eager.program import Program

__all__ = ["Batch", "EagerRun", "together"]


@define(eq=False)
class Row:
    """One request of a batch, as far as it has come.

    Attributes:
        request: the request.
        sampling: how its tokens are chosen.
        tokens: prompt and completion so far.
        waiting: steps that nobody has asked for yet; ``None`` for logits that were no numbers.
        reason: why it ended; ``None`` while it goes on.
        broken: whether its logits were no numbers, which ends it too.
        closed: whether nobody will ask for more.
    """

    request: ForwardRequest
    sampling: Sampling
    tokens: list[int]
    waiting: deque[Step | None] = field(factory=deque)
    reason: str | None = None
    broken: bool = False
    closed: bool = False
    _generator: torch.Generator | None = None

    @property
    def live(self) -> bool:
        """Whether it gets more tokens."""
        return self.reason is None and not (self.broken or self.closed)

    def take(self, logits: Tensor, best: int, finite: bool, ends: frozenset[int]) -> None:
        """One more token from its ``[vocab]`` logits, whose largest is that of ``best``."""
        if not finite:
            self.broken = True
            self.waiting.append(None)
            return
        token = best if self._greedy else chosen(logits, self.sampling, self.tokens, self._seeded(logits))
        self.tokens.append(token)
        if token in (ends if self.sampling.stop_token_ids is None else self.sampling.stop_token_ids):
            self.reason = "stop"
        elif len(self.tokens) - len(self.request.token_ids) >= self.sampling.max_tokens:
            self.reason = "length"
        kept = logits.to("cpu", copy=True) if self.request.want_logits else None
        self.waiting.append(Step(token_id=token, logits=kept, logprobs=most_likely(logits, self.request.n_logprobs)))

    @property
    def _greedy(self) -> bool:
        return self.sampling.temperature == 0.0 and self.sampling.repetition_penalty == 1.0

    def _seeded(self, logits: Tensor) -> torch.Generator | None:
        if self._generator is None and self.sampling.seed is not None:
            self._generator = torch.Generator(logits.device).manual_seed(self.sampling.seed)
        return self._generator


@define(eq=False)
class Batch:
    """Requests that generate together. Hooks are on the model only while a step runs.

    A row that has ended stays, and is neither read nor written any more: so the numbers of the others do not depend
    on when it ends, to the last bit.
    """

    backend: EagerBackend
    rows: list[Row]
    collector: Collector = field(factory=Collector)
    failed: bool = False
    _cache: Any = None
    _carried: Carried | None = None
    _mask: Tensor | None = None
    _done: list[int] = field(factory=list)
    _program: Program | None = None
    _programmed: tuple[bool, ...] = ()
    _running: bool = False

    def step(self) -> None:
        """One forward, and one more token for every row that has not ended.

        Raises:
            BackendUnavailable: the model was shut down.
            RequestError: the forward failed, now or before.
        """
        self.backend.require_model()
        if self.failed:
            raise RequestError("an earlier step of this generation failed, and its cache is in no known state")
        self._running, self.failed = True, True
        try:
            if self._carried is None:
                self._carried = Carried(self.backend.places)
            with self._carried.in_place():
                logits = self._next() if self._done else self._first()
            best, finite = logits.argmax(-1).tolist(), logits.amax(-1).isfinite().tolist()
            with torch.inference_mode(False), torch.no_grad():
                for i, row in enumerate(self.rows):
                    if row.live:
                        row.take(logits[i], best[i], finite[i], self.backend.end_tokens)
            self.failed = False
        finally:
            self._running = False
            self.free()

    def free(self) -> None:
        """Let go of the cache once no row goes on; a step that runs in another thread does so at its end."""
        if not self._running and (self.failed or not any(row.live for row in self.rows)):
            self._cache = self._carried = self._program = self._mask = None

    def _first(self) -> Tensor:
        """All prompts; logits ``[rows, vocab]`` after the last token of each."""
        prompts = [row.request.token_ids for row in self.rows]
        lengths = [len(prompt) for prompt in prompts]
        unequal = min(lengths) < max(lengths)
        inputs = self.backend.padded(prompts)
        cache = self.backend.new_cache(rows=len(prompts), windows=not unequal)
        chunk = Chunk([0] * len(lengths), lengths, lengths)
        logits = self.backend.step(self._compiled(), inputs, cache, chunk, self.collector)
        if unequal:
            cache = aligned(cache, lengths, self.backend.new_cache())
            # The right padding of the prompts, turned round.
            self._mask = inputs["attention_mask"].flip(1)
        self._cache, self._done = cache, lengths
        return logits

    def _next(self) -> Tensor:
        """The last token of each row."""
        device = self.backend.device
        rereads = self.backend.profile.facts.rereads
        ids = [row.tokens if rereads else row.tokens[-1:] for row in self.rows]
        inputs: dict[str, Any] = {"input_ids": torch.tensor(ids, device=device)}
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
            inputs["attention_mask"] = self._mask
        if self.backend.takes_positions and (self._mask is not None or self.backend.counts_from_cache):
            inputs["position_ids"] = torch.tensor(self._done, device=device)[:, None]
        chunk = Chunk(self._done, [1] * len(self.rows), [len(row.request.token_ids) for row in self.rows])
        logits = self.backend.step(self._compiled(), inputs, self._cache, chunk, self.collector)
        self._done = [done + row.live for done, row in zip(self._done, self.rows, strict=True)]
        return logits

    def _compiled(self) -> Program:
        """The work at the model's sites, for the rows that go on."""
        live = tuple(row.live for row in self.rows)
        if self._program is None or self._programmed != live:
            requests = [row.request if row.live else evolve(row.request, reads=(), writes=()) for row in self.rows]
            self._program, self._programmed = self.backend.compiled(requests), live
        return self._program


@define(eq=False)
class EagerRun:
    """One generation of a batch. Asking it for a step makes one for each of the batch."""

    batch: Batch
    index: int
    _given: int = field(default=0, init=False)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, once its last step was given."""
        return None if self._row.waiting else self._row.reason

    @property
    def _row(self) -> Row:
        return self.batch.rows[self.index]

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        row = self._row
        if row.closed or not (row.waiting or row.live):
            raise StopIteration
        if not row.waiting:
            self.batch.step()
        step = row.waiting.popleft()
        if step is None:
            raise RequestError(
                "the forward gave logits that are no numbers (NaN or infinite): an operation is too strong for the "
                "model's dtype, or its weights are broken"
            )
        self._given += 1
        return step

    def result(self) -> ForwardResult:
        """Rows of every position that went through the forward for the steps given so far."""
        collector, masked = self.batch.collector, float("-inf")
        with torch.inference_mode(False), torch.no_grad():
            rows = {
                address: collector.rows(
                    self.index, address, masked if address.name == "attn_scores" else 0.0, forwards=self._given
                )
                for address in (read.address for read in self._row.request.reads)
                if collector.has(self.index, address)
            }
        return ForwardResult(rows=rows)

    def close(self) -> None:
        """End it; the cache is freed with the last of the batch."""
        self._row.closed = True
        self.batch.free()


def together(backend: EagerBackend, requests: Sequence[ForwardRequest]) -> list[EagerRun]:
    """Begin requests as one batch; nothing runs yet."""
    rows = []
    for request in requests:
        if request.sampling is None:
            raise ValueError("a generation needs sampling")
        rows.append(Row(request, request.sampling, list(request.token_ids)))
    batch = Batch(backend, rows)
    return [EagerRun(batch, i) for i in range(len(rows))]
