"""Bindings for vLLM: where DeepSeek-V4's tensors are in vLLM's own model (version 0.32), for CPUs and NVIDIA GPUs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from interp_core.address import Address
from interp_core.errors import BackendUnavailable
from interp_core.expressions import Binding, Derived, Expression, Permute, Place, Read
from interp_core.facts import ModelFacts
from interp_core.layout import Layout
from interp_deepseek_v4.kernels.rope import rotate
from interp_deepseek_v4.probes import split_layers, unfused
from interp_vllm.trunk import VllmTrunk

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.profile import ModelProfile

__all__ = ["deepseek_v4"]

_SIZES: Final = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 512}
"""What vLLM's kernels, metadata and caches take for granted."""

_CPU, _NVIDIA = "vllm.models.deepseek_v4.cpu.model", "vllm.models.deepseek_v4.nvidia.model"


def rotated_key(rows: Tensor, place: Place) -> Tensor:
    """Normed keys after the rotation, which attention reads as keys and as values."""
    found: Tensor = rotate(rows, place.positions, _table(place)).to(rows.dtype)
    return found


def unrotated_heads(rows: Tensor, place: Place) -> Tensor:
    """Attention's output without the rotation that its values carried: what the grouped projection reads."""
    attention: Any = place.module("attn")
    heads = rows.unflatten(-1, (-1, attention.head_dim))
    return rotate(heads, place.positions, _table(place), inverse=True).to(rows.dtype).flatten(-2)


def normed_query(rows: Tensor, place: Place) -> Tensor:
    """Queries after their norm, which has no gain; vLLM's kernel does it in one go with the rotation."""
    attention: Any = place.module("attn")
    heads = rows.unflatten(-1, (-1, attention.head_dim)).float()
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + attention.eps)
    return normed.to(rows.dtype).flatten(-2)


def chosen_experts(ids: Tensor, logits: Tensor, place: Place) -> Tensor:
    """Indices ``[rows, top_k]`` as the model's router chooses: by a table of token ids, or by biased scores."""
    gate: Any = place.module("mlp.router")
    if gate.tid2eid is not None:
        table: Tensor = gate.tid2eid
        return table[ids[..., 0].long()].long()
    biased = _scores(logits) if gate.e_score_correction_bias is None else _scores(logits) + gate.e_score_correction_bias
    return torch.topk(biased, place.module("mlp").n_activated_experts, dim=-1, sorted=False).indices


def expert_weights(ids: Tensor, logits: Tensor, place: Place) -> Tensor:
    """Weights ``[rows, top_k]`` of the chosen experts, as the model scales them."""
    moe: Any = place.module("mlp")
    weights = _scores(logits).gather(-1, chosen_experts(ids, logits, place))
    if moe.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    found: Tensor = weights * moe.routed_scaling_factor
    return found


def _scores(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits.float()).sqrt()


def _table(place: Place) -> Tensor:
    attention: Any = place.module("attn")
    table: Tensor = attention.rotary_emb.cos_sin_cache
    return table


_ROUTING: Final = (Read("mlp", "input", slot=1), Read("mlp.router"))

_POINTS: Final[Mapping[str, Expression]] = {
    "embeddings": Read("embed"),
    "final_norm": Read("final_norm"),
    "lm_head": Read("lm_head"),
    "resid_mid": Read("hyper.mlp", "input"),
    "attn_in": Read("attn", "input", slot=1),
    "attn_out": Read("attn"),
    "q_norm_in": Read("attn.q_b"),
    "q_norm_out": Derived((Read("attn.q_b"),), normed_query),
    "k_norm_in": Read("attn.k_norm", "input"),
    "k_norm_out": Read("attn.k_norm"),
    "value": Derived((Read("attn.k_norm"),), rotated_key),
    "z": Derived((Read("attn.heads"),), unrotated_heads),
    "mlp_in": Read("mlp", "input"),
    "mlp_out": Read("mlp"),
    "router_logits": Read("mlp.router"),
    "expert_indices": Derived(_ROUTING, chosen_experts),
    "expert_weights": Derived(_ROUTING, expert_weights),
}


class DeepseekV4Trunk(VllmTrunk):
    """The hyper-connections as vLLM's functions compute them, with probes where vLLM has no module."""

    def arguments(self, profile: ModelProfile) -> dict[str, Any]:
        """Nothing but refusals: of a checkpoint that vLLM cannot read, and of a build without kernels."""
        _require_published(profile.model_id)
        if profile.spec.hooks:
            _require_one_rank(profile.options)
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and not profile.options["reference_kernels"]:
            _require_kernels(profile)
        # The metadata of the sparse attention is built for blocks of 256 tokens.
        return {"block_size": 256} if profile.options["block_size"] is None else {}

    def prepare(self, options: Mapping[str, Any]) -> None:
        """Install the reference kernels, where they were asked for."""
        if options["reference_kernels"]:
            from interp_deepseek_v4.kernels import install

            install(replace=True)

    def layout(self, model: Any, facts: ModelFacts) -> Layout:
        """vLLM's modules by role, and probes of our own."""
        trunk = model.model
        home = type(model).__module__
        layout = Layout({"embed": trunk.embed_tokens, "final_norm": trunk.norm, "lm_head": model.lm_head})
        layout.trunk["contraction"] = trunk
        for layer in trunk.layers:
            if not hasattr(layer, "attn"):
                # The place of a block that another pipeline stage holds.
                layout.blocks.append({})
                continue
            roles: dict[str, Any] = {"block": layer, "attn": layer.attn, "mlp": layer.ffn, "mlp.router": layer.ffn.gate}
            roles |= {"attn.q_b": layer.attn.wq_b, "attn.k_norm": layer.attn.kv_norm}
            if home == _CPU:
                roles |= split_layers(layer)
            elif home == _NVIDIA:
                roles |= unfused(layer, importlib.import_module(_NVIDIA))
            else:
                raise BackendUnavailable(f"vLLM runs this model by {home}, whose tensors are not described yet")
            layout.blocks.append(roles)
        return layout

    def bind(self, address: Address, facts: ModelFacts, layout: Layout) -> Binding:
        """Streams, coefficients, then the general points."""
        found = _POINTS.get(address.name)
        if found is not None:
            return Binding(found)
        site, _, part = address.name.partition("_stream_")
        if part == "mix":
            streams = facts.n_streams
            # Kept as [from, to]; a point's new = mix @ streams sums over its last axis.
            return Binding(Permute(Read(f"hyper.{site}", slot=2), (streams, streams), (1, 0)))
        if part:
            return Binding(Read(f"hyper.{site}", slot=0 if part == "collapse" else 1))
        deferred = address.layer is not None and layout.has("streams.out", address.layer)
        if address.name == "resid_pre":
            return Binding(Read("streams.in") if deferred else Read("block", "input"))
        if address.name in ("resid_streams", "resid_post"):
            return Binding(Read("streams.out") if deferred else Read("block"))
        raise KeyError(address.name)

    def contract(self, stack: Tensor, layout: Layout) -> Tensor:
        """Through the model's own contraction."""
        trunk: Any = layout.trunk["contraction"]
        weights = (trunk.hc_head_fn, trunk.hc_head_scale, trunk.hc_head_base, trunk.rms_norm_eps, trunk.hc_eps)
        if hasattr(trunk, "hc_head_op"):
            compute: Any = trunk.hc_head_op
        else:
            compute = importlib.import_module(_NVIDIA).hc_head_fused_kernel_tilelang
        found: Tensor = compute(stack, *weights)
        return found


def _require_one_rank(options: Mapping[str, Any]) -> None:
    """Refuse ranks that split the model: how each tensor is split over them is not described."""
    split = [f"{n}={options[n]}" for n in ("tensor_parallel_size", "pipeline_parallel_size") if (options[n] or 1) > 1]
    if split:
        raise BackendUnavailable(
            f"DeepSeek-V4 is read and written on one rank only, and {' and '.join(split)} was asked for; "
            "backend='vllm-generate' generates with several"
        )


def _require_kernels(profile: ModelProfile) -> None:
    """Refuse a build of vLLM whose compiled kernels are not there, or take another dtype."""
    from interp_deepseek_v4.kernels import needed

    lacking = needed()
    dtype = profile.facts.dtype if profile.options["dtype"] == "auto" else profile.options["dtype"]
    if lacking:
        shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        why = (
            f"lacks compiled kernels of DeepSeek-V4 for this CPU ({shown}; the build for AVX512 with bfloat16 has them)"
        )
    elif dtype not in ("bfloat16", "float16"):
        why = f"has kernels of DeepSeek-V4 for bfloat16 and float16 only, and {dtype} was asked for"
    elif profile.facts.quantization is None:
        why = "leaves out the limit on the activations of unquantised experts (swiglu_limit) without a word"
    else:
        return
    raise BackendUnavailable(
        f"this build of vLLM {why}. load_model(..., reference_kernels=True) runs vLLM's own model through plain torch "
        "instead, exactly and slowly; backend='eager' is another way"
    )


def _require_published(model_id: str) -> None:
    """Refuse what vLLM cannot read (names and keys that transformers saved), and sizes that it has no kernels for."""
    file = Path(model_id).expanduser() / "config.json"
    if not file.is_file():
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    if "compress_ratios" not in values:
        raise BackendUnavailable(
            f"{model_id} was saved by transformers, whose configuration keys (layer_types, mlp_layer_types, "
            "compress_rates) and weight names vLLM's DeepSeek-V4 does not read; give the published form "
            "(compress_ratios, num_hash_layers), or use backend='eager', which reads both"
        )
    wrong = [f"{key}={values[key]}, not {size}" for key, size in _SIZES.items() if values.get(key, size) != size]
    wrong += [f"a compress ratio of {ratio}" for ratio in sorted(set(values["compress_ratios"]) - {0, 4, 128})]
    if wrong:
        raise BackendUnavailable(
            f"vLLM's DeepSeek-V4 is written for the sizes of published models, and this one has {'; '.join(wrong)}; "
            "use backend='eager'"
        )


deepseek_v4: Final = DeepseekV4Trunk()
