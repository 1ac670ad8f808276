"""What generation, attention capture and the lens give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from interp_core.converters import as_tuple
from interp_core.requests import TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionRecord", "Completion", "GenStep", "LensResult"]


@frozen(kw_only=True)
class Completion:
    """One finished generation.

    Attributes:
        text: the new text only, without special tokens, ended before a stop string; ``None`` where the
            checkpoint has no tokenizer.
        token_ids: the new tokens only, an end-of-text token included.
        prompt_token_ids: the prompt, as it was run.
        finish_reason: ``"stop"`` (an end token or a stop string) or ``"length"``.
        logprobs: per new token, the most likely tokens, best first; ``None`` if none were asked for.
    """

    text: str | None
    token_ids: tuple[int, ...] = field(converter=as_tuple)
    prompt_token_ids: tuple[int, ...] = field(converter=as_tuple)
    finish_reason: str
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None


@frozen(kw_only=True, eq=False)
class GenStep:
    """One step of a stream. The ``token_str`` of all steps join to the completion's text exactly.

    Attributes:
        token_id: the new token.
        token_str: the text that became certain with it; empty while a character is unfinished;
            ``None`` where the checkpoint has no tokenizer.
        logits: ``[vocab]`` float32, the model's own before any penalty, or ``None`` where the backend keeps them.
        logprobs: the most likely tokens, best first, as many as were asked for.
    """

    token_id: int
    token_str: str | None
    logits: Tensor | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprob, ...] = ()


@frozen(kw_only=True, eq=False)
class AttentionRecord:
    """One layer's attention over one prompt.

    Attributes:
        scores: ``[heads, query, key]``, after scaling, softcap and mask; masked entries are ``-inf``.
        probs: ``[heads, query, key]``, their softmax; rows may sum below 1 where there are sinks.
        value: ``[kv_heads, pos, v_head_dim]``.
        entries: how many of the last key columns are compressed entries rather than tokens; 0 on most trunks.
    """

    scores: Tensor
    probs: Tensor
    value: Tensor
    entries: int = 0


@frozen(kw_only=True, eq=False)
class LensResult:
    """What each layer's residual would say if the trunk ended there.

    Attributes:
        token_ids: the prompt.
        layers: layers decoded, in order.
        positions: absolute positions decoded, in order.
        top_ids: ``[layers, positions, top_k]`` most likely token ids, best first.
        top_probs: ``[layers, positions, top_k]`` float32 probabilities, from the family's own logits.
    """

    token_ids: tuple[int, ...] = field(converter=as_tuple)
    layers: tuple[int, ...] = field(converter=as_tuple)
    positions: tuple[int, ...] = field(converter=as_tuple)
    top_ids: Tensor = field(repr=False)
    top_probs: Tensor = field(repr=False)
