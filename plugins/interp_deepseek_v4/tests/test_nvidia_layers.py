"""The unfused layers for vLLM's NVIDIA model, against that model's own forward, with reference kernels in its place.

vLLM's code of the layer runs here as it is; only the GPU functions that it calls by name are plain torch, and attention
and experts are small functions. What cannot be seen here is whether the GPU's unfused functions round as the fused do.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp_core.checks import difference
from interp_deepseek_v4.kernels.hyper import hc_post_fused_cpu, hc_pre_fused_cpu
from interp_deepseek_v4.probes import unfused

STREAMS, WIDTH, TOKENS, LAYERS = 4, 24, 9, 3


def post(x: Tensor, residual: Tensor, write: Tensor, mix: Tensor) -> Tensor:
    """``mhc_post_tilelang``."""
    return hc_post_fused_cpu(x, residual, write.squeeze(-1), mix)


def pre(stack: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *terms: Any, norm_weight: Any = None,
        norm_eps: float = 1e-6, **_: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``mhc_pre_tilelang``: terms are the epsilons, the factor of the weights and the iterations."""
    rms_eps, hc_eps, _sinkhorn_eps, _alpha, iterations = terms[:5]
    collapse, write, mix = hc_pre_fused_cpu(stack, fn, scale, base, STREAMS, iterations, rms_eps, hc_eps)
    if norm_weight is not None:
        collapse = normed(collapse, norm_weight, norm_eps)
    return write.unsqueeze(-1), mix, collapse


def fused_post_pre(x: Tensor, residual: Tensor, write: Tensor, mix: Tensor, *terms: Any, **norm: Any) -> Any:
    """``mhc_fused_post_pre_tilelang``."""
    stack = post(x, residual, write, mix)
    return (stack, *pre(stack, *terms, **norm))


def broadcast_pre(x: Tensor, *terms: Any, fn_broadcast: Any = None, **norm: Any) -> Any:
    """``mhc_pre_broadcast_tilelang``."""
    stack = x.unsqueeze(-2).repeat(1, STREAMS, 1)
    return (stack, *pre(stack, *terms, **norm))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMS norm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Norm(nn.Module):
    """The module whose weight the fused functions take."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH, generator=generator), requires_grad=False)
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.variance_epsilon)


class Attention(nn.Module):
    """Something that mixes tokens, called as vLLM calls its attention."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False)

    def _o_proj(self, heads: Tensor, positions: Tensor) -> Tensor:
        return heads.flatten(1) @ self.weight

    def forward(self, positions: Tensor, x: Tensor, scaling: Any) -> Tensor:
        return self._o_proj(x.cumsum(0).unflatten(-1, (2, -1)) / (1.0 + positions[:, None, None]), positions)


class Experts(nn.Module):
    """Something per token, called as vLLM calls its experts."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False)

    def forward(self, x: Tensor, input_ids: Tensor | None, metadata: Any = None) -> Tensor:
        assert input_ids is not None
        return torch.tanh(x @ self.weight) * (1 + input_ids[:, None] % 3)


class Layer(nn.Module):
    """The parts of a decoder layer that its forward uses; the forward is vLLM's."""

    def __init__(self, forward: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.hc_mult, self.rms_norm_eps, self.hc_eps, self.hc_post_alpha, self.hc_sinkhorn_iters = (
            STREAMS, 1e-6, 1e-6, 2.0, 20)  # fmt: skip
        self.use_sequence_parallel = False
        for site in ("attn", "ffn"):
            rows = (2 + STREAMS) * STREAMS
            setattr(self, f"hc_{site}_fn", 0.2 * torch.randn(rows, STREAMS * WIDTH, generator=generator))
            setattr(self, f"hc_{site}_base", 0.5 * torch.randn(rows, generator=generator))
            setattr(self, f"hc_{site}_scale", 0.5 + 0.1 * torch.randn(3, generator=generator))
        self.hc_attn_fn_broadcast = torch.zeros(1)
        self.attn_norm, self.ffn_norm = Norm(generator), Norm(generator)
        self.attn, self.ffn = Attention(generator), Experts(generator)
        self.vllm_forward = MethodType(forward, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vllm_forward(*args, **kwargs)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with its GPU functions replaced."""
    from vllm.models.deepseek_v4.nvidia import model

    for name, function in {
        "mhc_pre_tilelang": pre,
        "mhc_post_tilelang": post,
        "mhc_fused_post_pre_tilelang": fused_post_pre,
        "mhc_pre_broadcast_tilelang": broadcast_pre,
    }.items():
        assert hasattr(model, name)
        monkeypatch.setattr(model, name, function)
    return model


def run(layers: list[Layer], x: Tensor) -> Tensor:
    """The trunk's loop, as vLLM's model has it: what a layer gives goes into the next, and the last is finished."""
    positions, ids = torch.arange(TOKENS), torch.arange(TOKENS) * 5
    state: tuple[Any, ...] = (x, None, None, None)
    for layer in layers:
        hidden, residual, write, mix = state
        state = layer(hidden, positions, ids, write, mix, residual, mega_gate_metadata=None)
    return post(*state)


@pytest.mark.parametrize("broadcast", [True, False])
def test_watched_layers_give_the_same_and_show_every_stack(kernels: Any, broadcast: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(kernels.DeepseekV4DecoderLayer.forward, generator) for _ in range(LAYERS)]
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    x = x if broadcast else x.unsqueeze(-2).repeat(1, STREAMS, 1)
    wanted = run(layers, x)
    probes = [unfused(layer, kernels) for layer in layers]
    assert torch.equal(run(layers, x), wanted)  # No hook stands anywhere: vLLM's own forward runs.

    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda module, args, out: seen.__setitem__(name, (args[0], out))

    # One watched layer between two that are not, then all of them.
    for watched in ([1], [0, 1, 2]):
        handles = [p.register_forward_hook(keep(f"{role}.{i}")) for i in watched for role, p in probes[i].items()]
        assert difference(run(layers, x), wanted) < 1e-6
        for handle in handles:
            handle.remove()
    assert torch.equal(seen["streams.out.2"][1], post(*_state(layers, x)))
    for i in range(LAYERS):
        before, (collapse, write, mix) = seen[f"hyper.mlp.{i}"]
        layer = layers[i]
        out = layer.ffn(layer.ffn_norm(collapse), torch.arange(TOKENS) * 5)
        after = seen[f"streams.out.{i}"][1]
        assert difference(mix.transpose(-1, -2) @ before + write * out.unsqueeze(-2), after) < 1e-6
        assert difference(mix @ before + write * out.unsqueeze(-2), after) > 1e-2
        if i:
            assert difference(seen[f"streams.in.{i}"][0], seen[f"streams.out.{i - 1}"][1]) < 1e-6


def _state(layers: list[Layer], x: Tensor) -> tuple[Tensor, ...]:
    positions, ids = torch.arange(TOKENS), torch.arange(TOKENS) * 5
    state: tuple[Any, ...] = (x, None, None, None)
    for layer in layers:
        hidden, residual, write, mix = state
        state = layer(hidden, positions, ids, write, mix, residual, None)
    return state


def test_a_written_stack_reaches_the_next_layer(kernels: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    layers = [Layer(kernels.DeepseekV4DecoderLayer.forward, generator) for _ in range(LAYERS)]
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    plain = run(layers, x)
    probes = [unfused(layer, kernels) for layer in layers]
    change = torch.zeros(TOKENS, STREAMS, WIDTH)
    change[4:, 2] = 3.0
    stacks: list[Tensor] = []

    def write(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        stacks.append(out)
        return out + change

    handle = probes[1]["streams.out"].register_forward_hook(write)
    steered = run(layers, x)
    handle.remove()
    assert difference(steered[:4], plain[:4]) < 1e-6
    assert difference(steered[4:], plain[4:]) > 1e-2
    # The last layer, alone, on the stack that was meant.
    expected = run([layers[2]], stacks[0] + change)
    assert difference(steered, expected) < 1e-6
