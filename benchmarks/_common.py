"""What the benchmarks share: the model, interleaved rounds, and the printed rows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

__all__ = ["checkpoint", "fresh", "interleaved"]


def checkpoint() -> str:
    """A folder with a random Llama of 12 layers, hidden 512, vocabulary 2048."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    config = LlamaConfig(vocab_size=2048, max_position_embeddings=1024, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def interleaved(
    runs: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time of each run by ``clock``; the order turns round each time, so that drift touches all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for round_ in range(rounds):
        names = list(runs) if round_ % 2 == 0 else list(runs)[::-1]
        for name in names:
            start = clock()
            runs[name]()
            times[name].append(clock() - start)
    return times


def fresh(prompts: list[list[int]]) -> list[list[int]]:
    """The same lengths, with first tokens that no earlier call had, so that no prefix is found in a cache."""
    now = time.perf_counter_ns()
    first = [3 + (now >> (8 * i)) % 2000 for i in range(3)]
    return [[*first, 3 + row, *prompt[4:]] for row, prompt in enumerate(prompts)]
