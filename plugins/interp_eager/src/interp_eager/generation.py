"""Generation with a key/value cache, one token per forward, reading and writing in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor

from interp_core.errors import RequestError
from interp_core.requests import ForwardRequest, ForwardResult, Sampling, Step, TokenLogprob
from interp_eager.collect import Chunk, Collector

if TYPE_CHECKING:
    from interp_eager.backend import EagerBackend

__all__ = ["EagerRun"]


@define(eq=False)
class EagerRun:
    """One generation. Hooks are on the model only while a step runs."""

    backend: EagerBackend
    request: ForwardRequest
    finish_reason: str | None = None
    _sampling: Sampling = field(init=False)
    _collector: Collector = field(factory=Collector, init=False)
    _cache: Any = field(default=None, init=False)
    _next: tuple[int, ...] = field(init=False)
    _done: int = field(default=0, init=False)
    _new: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)
    _generator: torch.Generator | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.request.sampling is None:
            raise ValueError("a generation needs sampling")
        self._sampling = self.request.sampling
        self._next = self.request.token_ids
        if self._sampling.seed is not None:
            self._generator = torch.Generator(self.backend.device).manual_seed(self._sampling.seed)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._closed or self.finish_reason is not None:
            raise StopIteration
        if self._cache is None and self.backend.model is not None:
            self._cache = self.backend.new_cache()
        chunk = Chunk((self._done,), (len(self._next),), (len(self.request.token_ids),))
        logits = self.backend.step(self.request, self._next, self._cache, chunk, self._collector)
        self._done += len(self._next)
        token = self._choose(logits)
        self._next = (token,)
        self._new += 1
        self._finish(token)
        return Step(
            token_id=token,
            logits=logits.cpu() if self.request.want_logits else None,
            logprobs=_top(logits, self.request.n_logprobs),
        )

    def result(self) -> ForwardResult:
        """Rows of every position that went through the forward."""
        masked = float("-inf")
        rows = {
            read.address: self._collector.rows(0, read.address, masked if read.address.name == "attn_scores" else 0.0)
            for read in self.request.reads
            if self._collector.has(0, read.address)
        }
        return ForwardResult(rows=rows)

    def close(self) -> None:
        """Free the cache."""
        self._closed = True
        self._cache = None

    def _finish(self, token: int) -> None:
        ends = self._sampling.stop_token_ids
        if token in (self.backend.end_tokens if ends is None else ends):
            self.finish_reason = "stop"
        elif self._new >= self._sampling.max_tokens:
            self.finish_reason = "length"

    def _choose(self, logits: Tensor) -> int:
        if not bool(logits.max().isfinite()):
            raise RequestError(
                "the forward gave logits that are no numbers (NaN or infinite): an operation is too strong for the "
                "model's dtype, or its weights are broken"
            )
        if self._sampling.temperature == 0.0:
            return int(logits.argmax())
        scores = _restricted(logits[None], self._sampling)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def _restricted(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores ``[1, vocab]`` after transformers' own warpers, in the order that it applies them."""
    from transformers.generation import logits_process as warpers

    chain = [warpers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        chain.append(warpers.TopKLogitsWarper(min(sampling.top_k, scores.shape[-1])))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        chain.append(warpers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        chain.append(warpers.MinPLogitsWarper(sampling.min_p))
    for warper in chain:
        scores = warper(None, scores)
    return scores


def _top(logits: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    if not count:
        return ()
    best = logits.log_softmax(-1).topk(count)
    return tuple(TokenLogprob(int(i), float(p)) for i, p in zip(best.indices, best.values, strict=True))
