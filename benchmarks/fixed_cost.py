"""What a call costs beside its forward: one capture on a tiny model, against bare hooks of one's own; and its memory.

    python benchmarks/fixed_cost.py [--rounds N] [--json]

The tiny model is a random Llama of 2 layers, hidden 32, and its prompt 4 tokens: a forward is then so short that what
a call does beside it shows. Bare hooks are forward hooks that keep a copy, installed and removed around each forward.
Memory is measured on a model of 12 layers, hidden 512, with 8 prompts of 512 tokens: how much the process's peak grows
in a capture of every layer beyond the peak of plain forwards, against the bytes that are captured. What the C library's
allocator leaves unused makes single processes differ by a fifth, so it is the median of several new ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from _common import checkpoint, interleaved

from interp_core import load_model, run_with_cache

TARGET_MS, TARGET_MEMORY = 1.0, 1.10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {**typical_memory(), **fixed(options.rounds)}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"bare hooks {found['bare_ms']:.2f} ms, capture {found['capture_ms']:.2f} ms: {found['fixed_ms']:.2f} ms "
        f"more per call (target {TARGET_MS:.2f})"
    )
    print(
        f"captured {found['captured_mib']:.0f} MiB, peak grew by {found['grown_mib']:.0f} MiB: ratio "
        f"{found['memory_ratio']:.2f} (target {TARGET_MEMORY:.2f})"
    )


def fixed(rounds: int) -> dict[str, float]:
    """Milliseconds of one capture on a tiny model, by this library and by bare hooks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    model = load_model(folder, backend="eager", dtype="float32").warmup()
    network: Any = model.session.backend()
    tokens = torch.tensor([[3, 9, 27, 5]])

    def bare() -> dict[int, torch.Tensor]:
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                kept[layer] = (output if torch.is_tensor(output) else output[0]).detach().clone()

            return hook

        handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(network.model.model.layers)]
        try:
            with torch.no_grad():
                network.model.model(input_ids=tokens, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return kept

    runs = {"bare": bare, "capture": lambda: run_with_cache(model, tokens, ["resid_post.*"])}
    times = {name: 1e3 * statistics.median(t) for name, t in interleaved(runs, rounds, time.process_time).items()}
    return {"bare_ms": times["bare"], "capture_ms": times["capture"], "fixed_ms": times["capture"] - times["bare"]}


def typical_memory(processes: int = 7) -> dict[str, float]:
    """What :func:`memory` says, in the median of several new processes."""
    found = []
    for _ in range(processes):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(memory).result())
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def memory() -> dict[str, float]:
    """MiB that a capture of every layer adds to the peak of plain forwards, in this process."""
    torch.set_num_threads(1)
    model = load_model(checkpoint(), backend="eager", dtype="float32").warmup()
    network: Any = model.session.backend()
    tokens = torch.randint(0, 2048, (8, 512), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(3):
            network.model(input_ids=tokens, use_cache=False)
    before = _peak_mib()
    cache = run_with_cache(model, tokens, ["resid_post.*", "mlp_act.*"])
    captured = sum(t.numel() * t.element_size() for t in cache.values()) / 2**20
    grown = _peak_mib() - before
    return {"captured_mib": captured, "grown_mib": grown, "memory_ratio": grown / captured}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
