"""Modules of our own in vLLM's DeepSeek-V4, at tensors that no module of vLLM's gives: where hooks can stand.

They compute what vLLM's code computes there, by vLLM's own functions, and are put on the layers of one model in the
worker of an engine that was built for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Connection", "Passage", "split_layers", "unfused"]


class Connection(nn.Module):
    """One hyper-connection: a stack ``[tokens, streams, d_model]`` in; collapse, write and mix out."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[tokens, d_model]``, ``[tokens, streams, 1]``, ``[tokens, streams, streams]``."""
        collapse, write, mix = self.compute(stack)
        return collapse, write, mix


class Passage(nn.Module):
    """A tensor on its way: what comes in goes out."""

    def forward(self, tensor: Tensor) -> Tensor:
        """The same tensor."""
        return tensor


def split_layers(layer: Any) -> dict[str, nn.Module]:
    """The probes of a layer of vLLM's model for CPUs, which calls ``hc_pre`` once per sublayer, by role."""
    plain = type(layer).hc_pre
    sites = {
        "hyper.attn": (layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base),
        "hyper.mlp": (layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base),
    }
    # The layer's own method, with the weights of one sublayer.
    probes = {role: Connection(_bound(plain, layer, weights)) for role, weights in sites.items()}
    by_weight = {id(weights[0]): probes[role] for role, weights in sites.items()}

    def hc_pre(stack: Tensor, weight: Tensor, scale: Tensor, base: Tensor) -> Any:
        return by_weight[id(weight)](stack)

    # Past torch's own bookkeeping: the layer calls an attribute, and no state of the model changes.
    object.__setattr__(layer, "hc_pre", hc_pre)
    return {**probes, "attn.heads": _heads(layer.attn)}


def _bound(plain: Any, layer: Any, weights: tuple[Tensor, Tensor, Tensor]) -> Any:
    return lambda stack: plain(layer, stack, *weights)


def _heads(attention: Any) -> Passage:
    """What the attention kernel gives, ``[tokens, heads, head_dim]``, still rotated, on its way to the projection."""
    plain = attention._o_proj
    passage = Passage()

    def o_proj(heads: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = plain(passage(heads), positions)
        return found

    object.__setattr__(attention, "_o_proj", o_proj)
    return passage


def unfused(layer: Any, kernels: Any) -> dict[str, nn.Module]:
    """The probes of a layer of vLLM's model for NVIDIA GPUs, by role.

    That model defers: a layer gives its last sublayer's output beside the stack before it, and one fused kernel makes
    the stack, the next coefficients and the next normed input of them, so that most tensors are nowhere. Where a hook
    stands on a probe, the layer runs step by step through the same library's unfused functions instead; else as it is.

    Args:
        layer: vLLM's decoder layer.
        kernels: the module whose ``mhc_pre_tilelang`` and ``mhc_post_tilelang`` the layer uses.
    """
    fused = layer.forward
    attn = Connection(lambda stack: _pre(layer, kernels, stack, "attn"))
    mlp = Connection(lambda stack: _pre(layer, kernels, stack, "ffn"))
    probes: dict[str, nn.Module] = {
        "streams.in": Passage(),
        "hyper.attn": attn,
        "hyper.mlp": mlp,
        "streams.out": Passage(),
        "attn.heads": _heads(layer.attn),
    }

    def forward(
        x: Tensor,
        positions: Tensor,
        input_ids: Tensor | None,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
        mega_gate_metadata: Any = None,
    ) -> Any:
        if not any(_watched(probe) for probe in probes.values()) or layer.use_sequence_parallel:
            return fused(x, positions, input_ids, post_mix, res_mix, residual, mega_gate_metadata)
        stack = _arrived(layer, kernels, x, post_mix, res_mix, residual)
        stack = probes["streams.in"](stack)
        collapse, write, mix = attn(stack)
        stack = kernels.mhc_post_tilelang(layer.attn(positions, layer.attn_norm(collapse), None), stack, write, mix)
        collapse, write, mix = mlp(stack)
        out = layer.ffn(layer.ffn_norm(collapse), input_ids, mega_gate_metadata)
        return _deferred(probes["streams.out"](kernels.mhc_post_tilelang(out, stack, write, mix)))

    object.__setattr__(layer, "forward", forward)
    return probes


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _pre(layer: Any, kernels: Any, stack: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
    weights = (getattr(layer, f"hc_{site}_{part}") for part in ("fn", "scale", "base"))
    write, mix, collapse = kernels.mhc_pre_tilelang(
        stack,
        *weights,
        layer.rms_norm_eps,
        layer.hc_eps,
        layer.hc_eps,
        layer.hc_post_alpha,
        layer.hc_sinkhorn_iters,
    )
    return collapse, write, mix


def _arrived(layer: Any, kernels: Any, x: Tensor, write: Any, mix: Any, residual: Tensor | None) -> Tensor:
    """The stack that a layer begins with, of what the layer before gave."""
    if residual is None:
        return x.unsqueeze(-2).repeat(1, layer.hc_mult, 1) if x.dim() == 2 else x
    stack: Tensor = kernels.mhc_post_tilelang(x, residual, write, mix)
    return stack


def _deferred(stack: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A finished stack in the form in which layers pass unfinished ones: nothing is written, nothing remixed."""
    tokens, streams, width = stack.shape
    eye = torch.eye(streams, dtype=torch.float32, device=stack.device).expand(tokens, streams, streams)
    return (
        stack.new_zeros(tokens, width),
        stack,
        torch.zeros(tokens, streams, 1, dtype=torch.float32, device=stack.device),
        eye.contiguous(),
    )
