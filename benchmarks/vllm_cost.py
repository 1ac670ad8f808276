"""What captures cost on the vLLM backend, in one run, as ratios of medians of interleaved rounds.

    python benchmarks/vllm_cost.py [--rounds N] [--json]

Throughput: 8 concurrent requests of 128 prompt tokens and 64 new ones on one engine, plain and with `resid_post` of
one layer or of all layers captured for each request; the ratio is plain time to captured time (1 is no cost).
Transfer: one prompt of 512 tokens, all layers' `resid_post` captured, on vLLM and on eager; the ratio is vLLM's
time to eager's. The model is a random Llama of 12 layers, hidden 512, float32, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from _common import checkpoint, fresh, interleaved

THROUGHPUT_TARGETS = {"one layer": 0.95, "all layers": 0.80}
TRANSFER_TARGET = 1.3

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def throughput(model: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of 8 concurrent generations."""
    import torch

    prompts = torch.randint(3, 2048, (8, 128), generator=torch.Generator().manual_seed(1)).tolist()
    plain: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    return interleaved(
        {
            # Plain requests share prefixes, so a new first token each time keeps their prefill honest.
            "plain": lambda: model.generate(fresh(prompts), **plain),
            "one layer": lambda: model.capture_generation(prompts, ["resid_post.6"], **plain),
            "all layers": lambda: model.capture_generation(prompts, ["resid_post.*"], **plain),
        },
        rounds,
    )


def transfer(model: Any, eager: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of a capture of all layers of 512 rows."""
    import torch

    prompt = torch.randint(3, 2048, (512,), generator=torch.Generator().manual_seed(2)).tolist()
    return interleaved(
        {
            "eager": lambda: eager.run_with_cache(prompt, ["resid_post.*"]),
            "vllm": lambda: model.run_with_cache(prompt, ["resid_post.*"]),
        },
        rounds,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    from interp_core import load_model

    torch.set_num_threads(1)
    folder = checkpoint()
    with load_model(folder, "vllm", dtype="float32", max_model_len=1024) as model:
        model.warmup()
        generation = throughput(model, options.rounds)
        with load_model(folder, "eager", dtype="float32") as eager:
            capture = transfer(model, eager.warmup(), 3 * options.rounds)
    base = statistics.median(generation["plain"])
    rows = {
        n: {"median_s": statistics.median(t), "throughput": base / statistics.median(t)} for n, t in generation.items()
    }
    first = statistics.median(capture["eager"])
    moved = {n: {"median_s": statistics.median(t), "ratio": statistics.median(t) / first} for n, t in capture.items()}
    if options.json:
        print(json.dumps({"throughput": rows, "transfer": moved}, indent=2))
        return
    for name, row in rows.items():
        target = f"  (target {THROUGHPUT_TARGETS[name]:.2f})" if name in THROUGHPUT_TARGETS else ""
        print(f"8 x (128 + 64), {name:12s} {row['median_s']:7.2f} s  throughput {row['throughput']:.3f}{target}")
    for name, row in moved.items():
        target = f"  (target {TRANSFER_TARGET:.1f})" if name == "vllm" else ""
        print(f"512 rows, all layers, {name:6s} {1e3 * row['median_s']:7.1f} ms  ratio {row['ratio']:.3f}{target}")


if __name__ == "__main__":
    main()
