"""The points inside a mixture of experts, against the experts of the checkpoint combined by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm_families import PROMPTS, Loader

from interp_core import Add, CapabilityUnsupported, run_with_cache
from interp_core.checks import difference

pytestmark = pytest.mark.vllm

TIGHT = 1e-5
NAMES = {"mixtral": ("block_sparse_moe", "w1 w3 w2"), "qwen3_moe": ("mlp", "gate_proj up_proj down_proj")}


def combined(weights: dict[str, Tensor], family: str, layer: int, x: Tensor, mix: Tensor, chosen: Tensor) -> Tensor:
    """``[pos, d_model]``: each row's experts, weighted."""
    block, parts = NAMES[family]
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(mix[row], chosen[row].tolist(), strict=True):
            prefix = f"model.layers.{layer}.{block}.experts.{expert}"
            gate, up, down = (weights[f"{prefix}.{part}.weight"] for part in parts.split())
            out[row] += weight * (down @ (torch.nn.functional.silu(gate @ x[row]) * (up @ x[row])))
    return out


@pytest.mark.parametrize("family", NAMES)
def test_experts_combined_by_hand_are_the_block(
    family: str, loaded: Loader, vllm_folders: Callable[[str], str]
) -> None:
    model = loaded(family)
    weights: dict[str, Any] = load_file(Path(vllm_folders(family)) / "model.safetensors")
    points = ["mlp_in.*", "router_logits.*", "expert_weights.*", "expert_indices.*", "mlp_out.*"]
    found = run_with_cache(model, PROMPTS[0], points)
    for layer in range(model.n_layers):
        x, logits, mix, chosen, out = (found[point.replace("*", str(layer))][0] for point in points)
        assert logits.shape == (10, 4)
        assert mix.shape == chosen.shape == (10, 2)
        assert chosen.dtype == torch.int64
        gate = weights[f"model.layers.{layer}.{NAMES[family][0]}.gate.weight"]
        assert difference(x @ gate.T, logits) < TIGHT
        by_hand = logits.softmax(-1).gather(1, chosen)
        assert difference(by_hand / by_hand.sum(-1, keepdim=True), mix) < TIGHT
        assert torch.equal(chosen.sort(-1).values, logits.topk(2).indices.sort(-1).values)
        assert difference(combined(weights, family, layer, x, mix, chosen), out) < TIGHT
        assert difference(combined(weights, family, layer, x, mix.flip(-1), chosen), out) > 100 * TIGHT
        first = run_with_cache(model, PROMPTS[0], [f"router_logits.{layer}.expert-3"])
        assert torch.equal(first[f"router_logits.{layer}.expert-3"][0], logits[:, 3])


@pytest.mark.parametrize("family", NAMES)
def test_writing_router_logits_changes_which_experts_run(
    family: str, loaded: Loader, vllm_folders: Callable[[str], str]
) -> None:
    model = loaded(family)
    weights: dict[str, Any] = load_file(Path(vllm_folders(family)) / "model.safetensors")
    points = ["mlp_in.1", "router_logits.1", "expert_weights.1", "expert_indices.1", "mlp_out.1"]
    plain = run_with_cache(model, PROMPTS[0], points)
    least = int(plain["router_logits.1"][0].mean(0).argmin())
    towards = torch.nn.functional.one_hot(torch.tensor(least), 4) * 50.0
    with model.steer(Add("router_logits.1", towards), positions=[4]):
        found = run_with_cache(model, PROMPTS[0], points)
    x, logits, mix, chosen, out = (found[point][0] for point in points)
    assert difference(logits[4], plain["router_logits.1"][0, 4] + towards) < TIGHT
    assert least in chosen[4].tolist()
    assert difference(combined(weights, family, 1, x, mix, chosen), out) < TIGHT
    assert difference(out[4], plain["mlp_out.1"][0, 4]) > 100 * TIGHT
    assert torch.equal(out[:4], plain["mlp_out.1"][0, :4])
    with pytest.raises(CapabilityUnsupported, match="rebuilt"):
        run_with_cache(model, PROMPTS[0], points, steering=[Add("expert_weights.1", torch.ones(2))])
