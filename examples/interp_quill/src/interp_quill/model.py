"""Quill for transformers: a decoder with names of its own, a residual multiplier, and parallel blocks on odd layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

__all__ = ["QuillConfig", "QuillForCausalLM"]


class QuillConfig(PretrainedConfig):
    """Sizes under the usual keys, and ``damping``, the factor on what every sublayer adds."""

    model_type = "quill"

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    damping: float = 0.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 512
    hidden_act: str = "silu"


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """``[batch, heads, pos, dim]`` turned by its positions ``[batch, pos]``, halves of a head as pairs."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions[:, None, :, None].float() * rates
    first, second = x.float().split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Gaze(nn.Module):
    """Attention with grouped keys."""

    def __init__(self, config: QuillConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, keys, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.seek = nn.Linear(config.hidden_size, heads * width, bias=False)
        self.mark = nn.Linear(config.hidden_size, keys * width, bias=False)
        self.content = nn.Linear(config.hidden_size, keys * width, bias=False)
        self.blend = nn.Linear(heads * width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """``[batch, pos, hidden]`` to the same."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for part in (self.seek, self.mark, self.content)
        )
        query, key = (rotated(part, positions, self.config.rope_theta) for part in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        found: Tensor = self.blend(out.transpose(1, 2).flatten(2))
        return found


class Forge(nn.Module):
    """A gated MLP whose input is damped by a gate of its own, ``quench``."""

    def __init__(self, config: QuillConfig) -> None:
        super().__init__()
        self.quench = nn.Linear(config.hidden_size, config.hidden_size)
        self.heat = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.iron = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.cast = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same."""
        x = x * torch.sigmoid(self.quench(x))
        found: Tensor = self.cast(F.silu(self.heat(x)) * self.iron(x))
        return found


class Rung(nn.Module):
    """One block: sequential on even layers, parallel on odd ones."""

    def __init__(self, config: QuillConfig, layer: int) -> None:
        super().__init__()
        self.parallel, self.damping = layer % 2 == 1, config.damping
        self.before_gaze = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gaze = Gaze(config, layer)
        self.before_forge = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.forge = Forge(config)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """``[batch, pos, hidden]`` to the same."""
        seen = self.gaze(self.before_gaze(x), positions, mask, cache) * self.damping
        if self.parallel:
            return x + seen + self.forge(self.before_forge(x)) * self.damping
        x = x + seen
        return x + self.forge(self.before_forge(x)) * self.damping


class QuillForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model."""

    config_class = QuillConfig
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: QuillConfig) -> None:
        super().__init__(config)
        self.lexicon = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rungs = nn.ModuleList(Rung(config, layer) for layer in range(config.num_hidden_layers))
        self.finish = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.scribe = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.lexicon

    def get_output_embeddings(self) -> nn.Module:
        """The unembedding."""
        return self.scribe

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of ``[batch, pos]`` ids; padding stands on the right."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = input_ids.shape[1]
        positions = (past + torch.arange(length, device=input_ids.device)).expand(input_ids.shape[0], -1)
        keys = torch.arange(past + length, device=input_ids.device)
        mask = keys[None, None, None, :] <= positions[:, None, :, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        x = self.lexicon(input_ids)
        for rung in self.rungs:
            x = rung(x, positions, mask, past_key_values if use_cache else None)
        logits = self.scribe(self.finish(x)[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
