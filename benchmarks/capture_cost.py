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
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import checkpoint, interleaved

from interp_core import load_model, run_with_cache

TARGETS = {"one resid_post": 1.02, "all resid_post": 1.05, "48 points": 1.15}
FOUR_PER_LAYER = ["resid_post.*", "attn_out.*", "mlp_out.*", "z.*"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(checkpoint(), backend="eager", dtype="float32").warmup()
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
        "48 points": lambda: run_with_cache(model, tokens, FOUR_PER_LAYER),
    }
    times = interleaved(runs, options.rounds, time.process_time)
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
