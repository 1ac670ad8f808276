"""How a row of logits becomes a token: transformers' own processors, in the order that it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interp_core.requests import Sampling, TokenLogprob

__all__ = ["chosen", "most_likely"]


def chosen(logits: Tensor, sampling: Sampling, seen: Sequence[int], generator: torch.Generator | None) -> int:
    """The next token of one request.

    Args:
        logits: ``[vocab]`` float32.
        sampling: how to choose.
        seen: ids of prompt and completion so far, for the repetition penalty.
        generator: the request's own; ``None`` for the process's.
    """
    scores = logits[None]
    for process in _processors(sampling, scores.shape[-1]):
        scores = process(torch.tensor([seen], device=logits.device), scores)
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    # One row at a time: what a request draws depends on its own generator, not on its neighbours.
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


def most_likely(logits: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The ``count`` best tokens of ``[vocab]`` logits, by the model's own distribution."""
    if not count:
        return ()
    best = logits.log_softmax(-1).topk(count)
    return tuple(TokenLogprob(int(i), float(p)) for i, p in zip(best.indices, best.values, strict=True))


def _processors(sampling: Sampling, vocab: int) -> list[Any]:
    from transformers.generation import logits_process as hf

    chain: list[Any] = []
    if sampling.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0.0:
        return chain
    chain.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        chain.append(hf.TopKLogitsWarper(min(sampling.top_k, vocab)))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    return chain
