"""What a capture costs: a plain forward and captures of it, interleaved in one process, as ratios of medians.

    python benchmarks/capture_cost.py [--rounds N] [--json]

The model is a random Llama of 12 layers, hidden 512, vocabulary 2048; the input is 8 prompts of 128 tokens. A
plain forward is transformers' own, without gradients and without a key/value cache. Ratios hold on one machine in
one run only; absolute times are printed so that noise can be judged. With 9 rounds a ratio was seen to wander by 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from interp_core import InterpModel, load_model, run_with_cache

TARGETS = {"one resid_post": 1.02, "all resid_post": 1.05}


def build() -> InterpModel:
    """The model, saved to a temporary folder and loaded through the public function."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(folder, backend="eager", dtype="float32").warmup()


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Process time of each run, interleaved so that drift of the machine touches all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for round_ in range(rounds):
        names = list(runs) if round_ % 2 == 0 else list(runs)[::-1]
        for name in names:
            start = time.process_time()
            runs[name]()
            times[name].append(time.process_time() - start)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build()
    tokens = torch.randint(0, 2048, (8, 128), generator=torch.Generator().manual_seed(1))
    inner: Any = model.session.backend()

    def plain() -> None:
        with torch.no_grad():
            inner.model(input_ids=tokens, use_cache=False)

    runs: dict[str, Callable[[], Any]] = {
        "plain forward": plain,
        "one resid_post": lambda: run_with_cache(model, tokens, ["resid_post.11"]),
        "all resid_post": lambda: run_with_cache(model, tokens, ["resid_post.*"]),
        "all resid_post + lm_head": lambda: run_with_cache(model, tokens, ["resid_post.*", "lm_head"]),
    }
    times = measure(runs, options.rounds)
    base = statistics.median(times["plain forward"])
    rows = {
        name: {"median_ms": 1e3 * statistics.median(t), "min_ms": 1e3 * min(t), "ratio": statistics.median(t) / base}
        for name, t in times.items()
    }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        target = f"  (target {TARGETS[name]:.2f})" if name in TARGETS else ""
        print(f"{name:26s} {row['median_ms']:8.1f} ms  min {row['min_ms']:8.1f} ms  ratio {row['ratio']:.3f}{target}")


if __name__ == "__main__":
    main()
