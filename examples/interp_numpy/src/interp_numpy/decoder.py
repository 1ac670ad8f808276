"""The forward of a Llama, in NumPy, float32: arithmetic only, nothing about requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define

from interp_core import LayerFacts, ModelFacts
from interp_numpy.weights import Array

__all__ = ["Decoder", "Keep", "Past"]

Keep = Callable[[str, int | None, Array], None]
"""Told of every tensor on the way, by point and layer: ``[pos, *axes]``, or ``[heads, query, key]``."""

Past = dict[int, tuple[Array, Array]]
"""Per layer, rotated keys and values so far, ``[pos, kv_heads, head_dim]``."""


@define(eq=False)
class Decoder:
    """A model: its facts, its weights by name, and its rotary frequencies."""

    facts: ModelFacts
    weights: dict[str, Array]
    frequencies: Array

    def blocks(self, ids: Sequence[int], past: Past, keep: Keep, depth: int) -> Array:
        """The residual ``[pos, d_model]`` after the first ``depth`` blocks; ``past`` grows by these positions."""
        start = len(past[0][0]) if past else 0
        angles = np.arange(start, start + len(ids), dtype=np.float32)[:, None, None] * self.frequencies
        turn = (np.cos(angles), np.sin(angles))
        x = self.weights["model.embed_tokens.weight"][list(ids)]
        keep("embeddings", None, x)
        for layer in self.facts.layers[:depth]:
            x = self._block(x, layer, turn, past, keep)
        return x

    def normed(self, x: Array, keep: Keep, *, logits: bool) -> Array:
        """Rows of the residual through the final norm; ``keep`` is told of their logits only where they are wanted."""
        rows = self._norm("model.norm", x)
        keep("final_norm", None, rows)
        if logits:
            keep("lm_head", None, self.unembed(rows))
        return rows

    def unembed(self, rows: Array) -> Array:
        """Logits of normed rows."""
        return self._linear("lm_head", rows)

    def _block(self, x: Array, layer: LayerFacts, turn: tuple[Array, Array], past: Past, keep: Keep) -> Array:
        i, name = layer.index, f"model.layers.{layer.index}"
        keep("resid_pre", i, x)
        inner = self._norm(f"{name}.input_layernorm", x)
        keep("attn_in", i, inner)
        z = self._attention(f"{name}.self_attn", inner, layer, turn, past, keep)
        keep("z", i, z)
        out = self._linear(f"{name}.self_attn.o_proj", z.reshape(len(x), -1))
        keep("attn_out", i, out)
        keep("attn_out_post", i, out)
        x = x + out
        keep("resid_mid", i, x)
        inner = self._norm(f"{name}.post_attention_layernorm", x)
        keep("mlp_in", i, inner)
        gate, linear = (self._linear(f"{name}.mlp.{part}_proj", inner) for part in ("gate", "up"))
        keep("mlp_pre", i, gate)
        keep("mlp_pre_linear", i, linear)
        act = _silu(gate) * linear
        keep("mlp_act", i, act)
        out = self._linear(f"{name}.mlp.down_proj", act)
        keep("mlp_out", i, out)
        keep("mlp_out_post", i, out)
        x = x + out
        keep("resid_post", i, x)
        return x

    def _attention(
        self, name: str, x: Array, layer: LayerFacts, turn: tuple[Array, Array], past: Past, keep: Keep
    ) -> Array:
        """What the heads read, ``[pos, heads, head_dim]``."""
        n, width, groups = len(x), layer.head_dim, layer.n_kv_heads
        q, k, v = (self._linear(f"{name}.{part}_proj", x).reshape(n, -1, width) for part in "qkv")
        keep("value", layer.index, v)
        k = _rotated(k, turn)
        if layer.index in past:
            k, v = (np.concatenate(pair) for pair in zip(past[layer.index], (k, v), strict=True))
        past[layer.index] = (k, v)
        # A group of heads shares its keys and values: [groups, heads of a group, query, key].
        grouped = _rotated(q, turn).reshape(n, groups, -1, width).transpose(1, 2, 0, 3)
        scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(width**-0.5)
        seen = np.arange(len(k)) <= np.arange(len(k) - n, len(k))[:, None]
        scores = np.where(seen, scores, np.float32(-np.inf))
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        keep("attn_scores", layer.index, scores.reshape(-1, n, len(k)))
        keep("attn_probs", layer.index, probs.reshape(-1, n, len(k)))
        mixed: Array = probs @ v.transpose(1, 0, 2)[:, None]
        return mixed.transpose(2, 0, 1, 3).reshape(n, -1, width)

    def _linear(self, name: str, x: Array) -> Array:
        y: Array = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: Array) -> Array:
        size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.facts.norm_eps))
        normal: Array = x / size * self.weights[f"{name}.weight"]
        return normal


def _rotated(x: Array, turn: tuple[Array, Array]) -> Array:
    (cos, sin), (first, second) = turn, np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and what is divided by it is 0
        y: Array = x / (1.0 + np.exp(-x))
    return y
