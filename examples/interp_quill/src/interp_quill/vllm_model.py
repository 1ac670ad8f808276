"""Quill for vLLM: an out-of-tree model class with the same module names, on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from interp_quill.model import Forge, QuillConfig, rotated

__all__ = ["QuillForCausalLM"]


class Gaze(nn.Module):
    """Attention through vLLM's kernel and its paged cache."""

    def __init__(self, config: QuillConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.config = config
        heads, keys, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.seek = nn.Linear(config.hidden_size, heads * width, bias=False)
        self.mark = nn.Linear(config.hidden_size, keys * width, bias=False)
        self.content = nn.Linear(config.hidden_size, keys * width, bias=False)
        self.blend = nn.Linear(heads * width, config.hidden_size, bias=False)
        self.kernel = Attention(
            heads,
            width,
            width**-0.5,
            num_kv_heads=keys,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.kernel",
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        turned = (self._turned(part(x), positions) for part in (self.seek, self.mark))
        found: Tensor = self.blend(self.kernel(*turned, self.content(x)))
        return found

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)[None]
        return rotated(heads, positions[None], self.config.rope_theta)[0].transpose(0, 1).flatten(1)


class Rung(nn.Module):
    """One block: sequential on even layers, parallel on odd ones."""

    def __init__(self, config: QuillConfig, vllm_config: VllmConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.parallel, self.damping = layer % 2 == 1, config.damping
        self.before_gaze = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gaze = Gaze(config, vllm_config, f"{prefix}.gaze")
        self.before_forge = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.forge = Forge(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        seen = self.gaze(self.before_gaze(x), positions) * self.damping
        if self.parallel:
            return x + seen + self.forge(self.before_forge(x)) * self.damping
        x = x + seen
        return x + self.forge(self.before_forge(x)) * self.damping


class QuillForCausalLM(nn.Module):
    """The whole model, as vLLM builds and calls it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.lexicon = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rungs = nn.ModuleList(
            Rung(config, vllm_config, layer, f"rungs.{layer}") for layer in range(config.num_hidden_layers)
        )
        self.finish = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.scribe = self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """``[tokens, hidden]``."""
        found: Tensor = self.lexicon(input_ids)
        return found

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        """``[tokens, hidden]`` behind the last norm."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        for rung in self.rungs:
            x = rung(x, positions)
        found: Tensor = self.finish(x)
        return found

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """``[rows, vocab]``."""
        found: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Tensors by the names that transformers saved them under, which are the names here."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameter = parameters[name.replace("scribe.", "lm_head.") if name not in parameters else name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded
