"""What the tests of trunks of several streams share: a trunk's addresses, its updates by the equations, tolerances.

``X`` is a token's stack ``[streams, d_model]``; a block is ``X' = mix @ X + write (x) sublayer(norm(collapse(X)))``,
once or twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from trunks import PROMPT

from interp_core import (
    Cache,
    InterpModel,
    parse_address,
    run_with_cache,
)

TIGHT = 2e-5
FAR = 1e-2
"""What a deliberately wrong variant must miss by, at least."""

AT = 9
"""The position that is written where one is."""

SINKHORN = ("deepseek_v4", "glm5_next")
TWO_SITES = (*SINKHORN, "hy_v4", "qwen4_exp_text")
Hook = tuple[str, str, Callable[[Any], Any]]


def inner_path(trunk: Any) -> str:
    return "model.language_model" if trunk.name == "glm5_next" else "model"


def inner(trunk: Any, whole: Any = None) -> Any:
    """The module that holds the blocks, of the loaded model or of another."""
    backend: Any = trunk.model.session.backend()
    return (backend.model if whole is None else whole).get_submodule(inner_path(trunk))


def served(model: InterpModel, *, write: bool = False) -> list[str]:
    """Every address that can be read (or written), residuals by stream."""
    found = []
    for spec in model.points():
        streams = range(model.facts.n_streams) if spec.name in ("resid_pre", "resid_mid", "resid_post") else [None]
        for layer in range(model.n_layers) if spec.scope == "layer" else [None]:
            for k in streams:
                address = spec.name if layer is None else f"{spec.name}.{layer}"
                address += "" if k is None else f".stream-{k}"
                if model.refusal(address, write=write) is None:
                    found.append(address)
    return found


def beside(trunk: Any) -> list[str]:
    """Outputs of modules that the equations of some trunks need and no point names."""
    blocks = f"path.{inner_path(trunk)}.layers"
    if trunk.name == "qwen4_exp_text":
        return [f"{blocks}.2.ple"]
    if trunk.name == "gemma3n_text":
        parts = "post_attention_layernorm laurel post_feedforward_layernorm post_per_layer_input_norm"
        return [f"{blocks}.{i}.{part}" for i in range(4) for part in parts.split()]
    return []


def captured(trunk: Any, tokens: list[int] = PROMPT, **options: Any) -> Cache:
    return run_with_cache(trunk.model, tokens, [*served(trunk.model), *beside(trunk)], **options)


def stack(trunk: Any, cache: Cache, point: str, layer: int) -> torch.Tensor:
    """``[pos, streams, d_model]`` out of the streams' own addresses."""
    streams = range(trunk.model.facts.n_streams)
    return torch.stack([cache[f"{point}.{layer}.stream-{k}"][0] for k in streams], dim=-2)


class Update(NamedTuple):
    """One update of the stack: ``after = mix @ before + write (x) out + extra``."""

    site: str
    before: torch.Tensor
    mix: torch.Tensor
    write: torch.Tensor
    out: torch.Tensor
    extra: torch.Tensor
    after: torch.Tensor

    def made(self, **changed: torch.Tensor) -> torch.Tensor:
        u = Update(**{**self._asdict(), **changed})
        return u.mix @ u.before + u.write.unsqueeze(-1) * u.out.unsqueeze(-2) + u.extra


def updates(trunk: Any, cache: Cache, i: int) -> list[Update]:
    """The updates of block ``i``: two, or one around both sublayers."""
    pre, post = stack(trunk, cache, "resid_pre", i), stack(trunk, cache, "resid_post", i)
    if trunk.name == "gemma3n_text":
        return [alternating(trunk, cache, i, pre, post)]
    mid, none = stack(trunk, cache, "resid_mid", i), torch.zeros_like(pre)
    ple = f"path.model.layers.{i}.ple"
    if parse_address(ple) in cache:
        pre = pre + cache[ple][0].unflatten(-1, pre.shape[-2:])
    found = []
    for site, before, after in (("attn", pre, mid), ("mlp", mid, post)):
        write, out = (cache[f"{site}_{part}.{i}"][0] for part in ("stream_write", "out"))
        # A layer that adds to its streams first has no matrix from one stack to the other; it mixes none.
        mix_at = parse_address(f"{site}_stream_mix.{i}")
        mix = cache[mix_at][0] if mix_at in cache else torch.eye(pre.shape[-2]).expand(len(pre), -1, -1)
        found.append(Update(site, before, mix, write, out, none, after))
    return found


def alternating(trunk: Any, cache: Cache, i: int, pre: torch.Tensor, post: torch.Tensor) -> Update:
    """Gemma 3n: what is written is the gain of the active stream; the others get a per-layer input besides."""
    mix, write = cache[f"attn_stream_mix.{i}"][0], cache[f"mlp_stream_write.{i}"][0]
    names = "post_attention_layernorm laurel post_feedforward_layernorm post_per_layer_input_norm"
    attn, laurel, mlp, own = (cache[f"path.model.layers.{i}.{name}"][0] for name in names.split())
    active = (mix @ pre)[:, 0]
    gain = (active + attn + laurel) / 2**0.5 + mlp - active
    extra = torch.stack([torch.zeros_like(own), own, own], dim=-2)
    return Update("block", pre, mix, write, gain, extra, post)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def reading(x: torch.Tensor, fn: Any, scale: Any, base: Any, norm_eps: float, eps: float) -> torch.Tensor:
    """Weights ``[pos, streams]`` that a hyper-connection reads streams with, from its first ``streams`` rows."""
    n = x.shape[-2]
    logits = rms(x.flatten(-2), norm_eps) @ fn[:n].T
    return torch.sigmoid(logits * scale[0] + base[:n]) + eps


def per_channel(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Qwen 4 Exp: each channel of each normed stream has a weight of its own."""
    n = x.shape[-2]
    gain = 1.0 + module.hc_norm.weight.unflatten(0, x.shape[-2:])
    normed = rms(x, module.hc_norm.eps) * gain
    low = normed.flatten(-2) @ module.input_mix_weight_down.weight.T / n
    weights = torch.sigmoid(torch.nn.functional.silu(low) @ module.input_mix_weight_up.weight.T)
    found: torch.Tensor = (weights.unflatten(-1, x.shape[-2:]) * normed).mean(-2)
    return found


def collapsed(trunk: Any, update: Update, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a sublayer reads of the streams, from the module's parameters; and the same with its weights rolled."""
    block, x = inner(trunk).layers[i], update.before
    if trunk.name == "gemma3n_text":
        predicted = update.mix @ x
        return predicted[:, 0], predicted[:, 1]
    if trunk.name == "qwen4_exp_text":
        module = getattr(block, f"{update.site}_hyper_connection")
        return per_channel(module, x), per_channel(module, x.roll(1, -2))
    module = block.attn_hc if update.site == "attn" else block.ffn_hc
    eps = inner(trunk).config.rms_norm_eps
    weights = reading(x, module.fn, module.scale, module.base, eps, module.hc_eps)
    assert float(weights.max() - weights.min()) > 0.3  # They differ from stream to stream and token to token.
    return (weights.unsqueeze(-1) * x).sum(-2), (weights.roll(1, -1).unsqueeze(-1) * x).sum(-2)


def hf_logits(whole: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found
