"""Whether a batch of unequal prompts generates what each of them does alone, in one forward per step or in several."""

from __future__ import annotations

from typing import Any

import torch

from interp_core import InterpModel
from interp_core.address import Address
from interp_core.checks import difference
from zoo.rules import PROMPT

__all__ = ["batch_misfit"]

_UNEQUAL = [list(PROMPT), list(PROMPT[4:7]), list(PROMPT[2:9])]
_NEW = 4


def batch_misfit(model: InterpModel, reads: list[Address]) -> float:
    """The largest difference of rows and of log-probabilities; infinite where tokens differ.

    Args:
        model: the model.
        reads: points with one row per position.
    """
    asked: dict[str, Any] = {"max_tokens": _NEW, "ignore_eos": True, "n_logprobs": 2}
    done, cache = model.capture_generation(_UNEQUAL, reads, **asked)
    worst = 0.0
    for i, prompt in enumerate(_UNEQUAL):
        alone, rows = model.capture_generation(prompt, reads, **asked)
        if alone.token_ids != done[i].token_ids:
            return float("inf")
        mine, other = (_values(one) for one in (done[i], alone))
        worst = max(worst, float((mine - other).abs().max()))
        for address in reads:
            n = rows[address].shape[1]
            worst = max(worst, difference(cache[address][i, :n], rows[address][0]))
    return worst


def _values(completion: Any) -> torch.Tensor:
    return torch.tensor([[entry.logprob for entry in best] for best in completion.logprobs])
