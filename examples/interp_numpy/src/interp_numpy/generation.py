"""Generation with a key/value cache, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from attrs import define, field

from interp_core import ModelProfile, RequestError
from interp_core.requests import ForwardRequest, ForwardResult, Sampling, Step, TokenLogprob
from interp_numpy.decoder import Decoder, Past
from interp_numpy.rows import Rows
from interp_numpy.weights import Array

__all__ = ["NumpyRun"]


@define(eq=False)
class NumpyRun:
    """One generation: an iterator of steps."""

    ready: Callable[[], Decoder]
    profile: ModelProfile
    request: ForwardRequest
    sampling: Sampling
    ends: frozenset[int]
    finish_reason: str | None = None
    _rows: Rows = field(init=False)
    _past: Past = field(factory=dict, init=False)
    _next: tuple[int, ...] = field(init=False)
    _seen: list[int] = field(init=False)
    _new: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)
    _draw: Callable[[], float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rows = Rows(self.profile, self.request)
        self._next = self.request.token_ids
        self._seen = list(self.request.token_ids)
        seed = self.sampling.seed
        self._draw = np.random.random if seed is None else np.random.default_rng(seed).random

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._closed or self.finish_reason is not None:
            raise StopIteration
        decoder = self.ready()
        x = decoder.blocks(self._next, self._past, self._rows, self.profile.facts.n_layers)
        rows = decoder.normed(x, self._rows, logits="lm_head" in self._rows.names)
        logits = decoder.unembed(rows[-1:])[0]
        token = self._choose(_penalised(logits, self._seen, self.sampling.repetition_penalty))
        self._seen.append(token)
        self._next, self._new = (token,), self._new + 1
        if token in self.ends:
            self.finish_reason = "stop"
        elif self._new >= self.sampling.max_tokens:
            self.finish_reason = "length"
        full = torch.from_numpy(logits.copy()) if self.request.want_logits else None
        return Step(token_id=token, logits=full, logprobs=_top(logits, self.request.n_logprobs))

    def result(self) -> ForwardResult:
        """Rows of every position that went through the forward."""
        return self._rows.result()

    def close(self) -> None:
        """Free the cache."""
        self._closed = True
        self._past = {}

    def _choose(self, logits: Array) -> int:
        if not np.isfinite(logits.max()):
            raise RequestError("the forward gave logits that are no numbers: the weights of this model are broken")
        if self.sampling.temperature == 0.0:
            return int(logits.argmax())
        order, probs = _restricted(logits, self.sampling)
        # The last one also where rounding leaves the sum a little below 1.
        place = int(np.searchsorted(np.cumsum(probs), self._draw(), side="right"))
        return int(order[min(place, len(order) - 1)])


def _penalised(logits: Array, seen: list[int], penalty: float) -> Array:
    """Logits with those of tokens that were seen made smaller, where the penalty is above 1."""
    if penalty == 1.0:
        return logits
    out, ids = logits.copy(), np.unique(seen)
    out[ids] = np.where(out[ids] > 0, out[ids] / penalty, out[ids] * penalty)
    return out


def _restricted(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Tokens that may be drawn, most likely first, and their probabilities: top_k, then top_p, then min_p."""
    order = np.argsort(-logits, kind="stable")[: sampling.top_k]
    probs = np.exp(_log_softmax(logits[order].astype(np.float64) / sampling.temperature))
    if sampling.top_p is not None:
        before = np.cumsum(probs) - probs
        probs = probs[before < sampling.top_p]
    if sampling.min_p is not None:
        probs = probs[probs >= sampling.min_p * probs[0]]
    return order[: len(probs)], probs / probs.sum()


def _top(logits: Array, count: int) -> tuple[TokenLogprob, ...]:
    best = np.argsort(-logits, kind="stable")[:count]
    values = _log_softmax(logits.astype(np.float64))[best]
    return tuple(TokenLogprob(int(token), float(value)) for token, value in zip(best, values, strict=True))


def _log_softmax(x: Array) -> Array:
    x = x - x.max()
    y: Array = x - np.log(np.exp(x).sum())
    return y
