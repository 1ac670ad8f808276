"""What declared taps cost a compiled vLLM, in one run, as ratios of medians of interleaved rounds.

    python benchmarks/static_cost.py [--rounds N] [--json]

Six engines are resident: compiled vLLM as it is (`vllm-generate`), `vllm-static` with `resid_post` of every layer
tapped and writable, and with three points of every layer tapped, and then the same three in the opposite order: of two
engines of the same kind the one that started first was the slower one by up to 6 %, so a kind's time is the mean of
its two. Each runs 8 concurrent requests of 128 prompt tokens and 64 new ones; nothing is fetched, since a tap copies
whether anybody asks or not. Then the same with one of the eight steered at one layer, and with all layers' rows
fetched for each. A ratio is the median over rounds of the throughput relative to plain compiled vLLM in the same round
(1 is no cost). The model is a random Llama of 12 layers, hidden 512, float32, one thread.

Memory is asked for in huge pages, of all engines alike: with pages of 4 KiB two engines of the same kind differed by a
factor of up to 1.9, the first to start the slowest, and with huge ones by a few hundredths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from _common import checkpoint, fresh, interleaved

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# PyTorch reads this when it first allocates, in each engine's own process.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# All engines compute on the same core, one after the other, and everything else is done on the others: where each
# engine gets a core of vLLM's choice, two engines of the same kind differ by a quarter.
_CORES = sorted(os.sched_getaffinity(0))
if len(_CORES) > 1:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_CORES[-1]))
    os.sched_setaffinity(0, _CORES[:-1])

TARGETS = {"a tap per layer": 0.97, "three taps per layer": 0.94, "one of eight steered": 0.95}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    from interp_core import Add, load_model

    torch.set_num_threads(1)
    folder = checkpoint()
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 2048}
    three = {"static_points": ["resid_post.*", "attn_out.*", "mlp_out.*"], "static_writes": ["resid_post.6"]}
    prompts = torch.randint(3, 2048, (8, 128), generator=torch.Generator().manual_seed(1)).tolist()
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "compiled": ("vllm-generate", {}),
        "tapped": ("vllm-static", {}),
        "three": ("vllm-static", three),
    }
    models: dict[tuple[str, int], Any] = {}
    for i, name in [*((0, n) for n in kinds), *((1, n) for n in reversed(kinds))]:
        backend, own = kinds[name]
        models[name, i] = load_model(folder, backend, **common, **own).warmup()
    plain: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    steering = [Add("resid_post.6", torch.linspace(-1, 1, 512), scale=0.5)]

    def plainly(model: Any) -> None:
        model.generate(fresh(prompts), **plain)

    def one_steered(model: Any) -> None:
        rows = fresh(prompts)
        with ThreadPoolExecutor(1) as pool:
            # Beside the others, in the same steps: a call of its own, since steering belongs to a call.
            steered = pool.submit(model.generate, rows[:1], steering=steering, **plain)
            model.generate(rows[1:], **plain)
            steered.result()

    def fetched(model: Any) -> None:
        model.capture_generation(prompts, ["resid_post.*"], **plain)

    jobs: dict[str, tuple[str, Callable[[Any], None]]] = {
        "compiled vLLM": ("compiled", plainly),
        "a tap per layer": ("tapped", plainly),
        "three taps per layer": ("three", plainly),
        "one of eight steered": ("tapped", one_steered),
        "all layers fetched": ("tapped", fetched),
    }
    runs: dict[str, Callable[[], Any]] = {
        f"{job} {i}": partial(run, models[kind, i]) for i in (0, 1) for job, (kind, run) in jobs.items()
    }
    times = interleaved(runs, options.rounds)
    for model in models.values():
        model.shutdown()
    report({job: list(zip(times[f"{job} 0"], times[f"{job} 1"], strict=True)) for job in jobs}, as_json=options.json)


def report(times: dict[str, list[tuple[float, float]]], *, as_json: bool) -> None:
    """Print, of each job, the times of its two engines and what they say."""
    base = [sum(pair) for pair in times["compiled vLLM"]]
    rows: dict[str, dict[str, Any]] = {
        job: {
            "median_s": [statistics.median(own) for own in zip(*pairs, strict=True)],
            "throughput": statistics.median(plain / sum(pair) for plain, pair in zip(base, pairs, strict=True)),
        }
        for job, pairs in times.items()
    }
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for job, row in rows.items():
        target = f"  (target {TARGETS[job]:.2f})" if job in TARGETS else ""
        seconds = " and ".join(f"{s:.2f}" for s in row["median_s"])
        print(f"8 x (128 + 64), {job:22s} {seconds} s  throughput {row['throughput']:.3f}{target}")


if __name__ == "__main__":
    main()
