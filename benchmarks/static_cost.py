"""What declared taps cost a compiled vLLM, in one run, as ratios of medians of interleaved rounds.

    python benchmarks/static_cost.py [--rounds N] [--json]

Four engines are resident: compiled vLLM as it is (`vllm-generate`) twice, the first and the last to start, and `vllm-
static` with `resid_post` of every layer tapped and writable, and with three points of every layer tapped. The faster of
the two plain ones is what the others are compared with; how far they are apart says what the ratios are worth. Each
runs 8 concurrent requests of 128 prompt tokens and 64 new ones; nothing is fetched, since a tap copies whether anybody
asks or not. Then the same with one of the eight steered at one layer, and with all layers' rows fetched for each. A
ratio is the throughput relative to plain compiled vLLM (1 is no cost). The model is a random Llama of 12 layers, hidden
512, float32, one thread.

No engine is left idle while the next one starts: two of the same kind were seen to differ by a factor of 1.9, the first
to start the slower one. (The cause is a guess: a kernel that takes back memory which nobody has touched for a minute.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from _common import checkpoint, fresh, interleaved

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# All engines compute on the same core, one after the other, and everything else is done on the others: where each
# engine gets a core of vLLM's choice, two engines of the same kind differ by a quarter.
_CORES = sorted(os.sched_getaffinity(0))
if len(_CORES) > 1:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_CORES[-1]))
    os.sched_setaffinity(0, _CORES[:-1])

TARGETS = {"a tap per layer": 0.97, "three taps per layer": 0.94, "one of eight steered": 0.95}


@contextmanager
def kept_busy(models: Collection[Any], prompts: list[list[int]], every_s: float = 10.0) -> Iterator[None]:
    """Let whatever is in ``models`` generate a little now and then, as long as the block runs."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(every_s):
            for model in list(models):
                model.generate(fresh(prompts), max_tokens=4, ignore_eos=True)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
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
        "again": ("vllm-generate", {}),
    }
    models: dict[str, Any] = {}
    with kept_busy(models.values(), prompts):
        for name, (backend, own) in kinds.items():
            models[name] = load_model(folder, backend, **common, **own).warmup()
    plain: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    steering = [Add("resid_post.6", torch.linspace(-1, 1, 512), scale=0.5)]

    def one_steered() -> None:
        model, rows = models["tapped"], fresh(prompts)
        with ThreadPoolExecutor(1) as pool:
            # Beside the others, in the same steps: a call of its own, since steering belongs to a call.
            steered = pool.submit(model.generate, rows[:1], steering=steering, **plain)
            model.generate(rows[1:], **plain)
            steered.result()

    runs = {
        "compiled vLLM": lambda: models["compiled"].generate(fresh(prompts), **plain),
        "a tap per layer": lambda: models["tapped"].generate(fresh(prompts), **plain),
        "three taps per layer": lambda: models["three"].generate(fresh(prompts), **plain),
        "compiled vLLM, again": lambda: models["again"].generate(fresh(prompts), **plain),
        "one of eight steered": one_steered,
        "all layers fetched": lambda: models["tapped"].capture_generation(prompts, ["resid_post.*"], **plain),
    }
    times = interleaved(runs, options.rounds)
    for model in models.values():
        model.shutdown()
    base = min(statistics.median(times[name]) for name in ("compiled vLLM", "compiled vLLM, again"))
    rows = {n: {"median_s": statistics.median(t), "throughput": base / statistics.median(t)} for n, t in times.items()}
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        target = f"  (target {TARGETS[name]:.2f})" if name in TARGETS else ""
        print(f"8 x (128 + 64), {name:22s} {row['median_s']:6.2f} s  throughput {row['throughput']:.3f}{target}")


if __name__ == "__main__":
    main()
