"""What generation costs: captures on the way against none, and a batch against its prompts one by one.

    python benchmarks/generation_cost.py [--rounds N] [--json]

The model is a random Llama of 12 layers, hidden 512, vocabulary 2048; 8 prompts of 32 to 128 tokens get 32 new ones
each. ``transformers`` is transformers' own loop over the same model with one prompt, argmax and a key/value cache, and
``generate`` this library's of the same prompt. Interleaved in one process, as ratios of medians of process time.
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

from interp_core import capture_generation, generate, load_model

BASES = {
    "transformers": "transformers",
    "generate": "transformers",
    "capture one resid_post": "generate",
    "capture all resid_post": "generate",
    "capture 48 points": "generate",
    "8 prompts one by one": "8 prompts one by one",
    "8 prompts in one batch": "8 prompts one by one",
}
TARGETS = {"capture one resid_post": 1.15, "capture all resid_post": 1.15, "capture 48 points": 1.15}
NEW = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(checkpoint(), backend="eager", dtype="float32").warmup()
    inner: Any = model.session.backend()
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 2048, (n,), generator=random).tolist() for n in (32, 48, 64, 72, 80, 96, 112, 128)]
    one, asked = prompts[2], {"max_tokens": NEW, "ignore_eos": True}
    points = [f"{name}.*" for name in ("resid_post", "attn_out", "mlp_out", "z")]

    def plain() -> None:
        with torch.no_grad():
            ids, cache = torch.tensor([one]), inner.new_cache()
            for _ in range(NEW):
                logits = inner.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)

    runs: dict[str, Callable[[], Any]] = {
        "transformers": plain,
        "generate": lambda: generate(model, one, **asked),
        "capture one resid_post": lambda: capture_generation(model, one, ["resid_post.11"], **asked),
        "capture all resid_post": lambda: capture_generation(model, one, ["resid_post.*"], **asked),
        "capture 48 points": lambda: capture_generation(model, one, points, **asked),
        "8 prompts one by one": lambda: [generate(model, prompt, **asked) for prompt in prompts],
        "8 prompts in one batch": lambda: generate(model, prompts, **asked),
    }
    times = interleaved(runs, options.rounds, time.process_time)
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = {
        name: {"median_ms": 1e3 * found, "min_ms": 1e3 * min(times[name]), "ratio": found / medians[BASES[name]]}
        for name, found in medians.items()
    }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        target = f"  (target {TARGETS[name]:.2f})" if name in TARGETS else ""
        print(f"{name:24s} {row['median_ms']:8.1f} ms  min {row['min_ms']:8.1f} ms  ratio {row['ratio']:.3f}{target}")


if __name__ == "__main__":
    main()
