"""Which requests generate together, and the key/value cache of prompts of unequal length.

Prompts are padded on the right for their own forward, which is exact in every family. From then on each step is one
column of real tokens, and the cache is moved so that all prompts end in its last column: windows and distances,
which modelling code counts in columns, are then right for every row. That takes a cache whose columns are tokens. A
trunk that carries a state from token to token (state spaces, convolutions, compressed keys) has none to move, so
there only prompts of one length go together.

Where rotary frequencies depend on the longest row of a batch, or masks on whether one is given, even a forward takes
prompts of one length only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from interp_core.facts import ModelFacts
from interp_core.requests import ForwardRequest

__all__ = ["aligned", "forwards", "generation_refusal", "generations", "padding_refusal"]

_MAX_TOKENS: Final = 16384
"""Tokens of one padded forward, or columns of one batch's cache; longer lists of prompts run as several."""

_COUNTED_FROM_THE_END: Final = frozenset({"mpt"})
"""Trunks whose attention scores have another constant per row beside a longer prompt; probabilities have not."""

_WIDENED: Final = frozenset({"git"})
"""Trunks that take any mask of a later step to be narrower than the cache."""

_WITHOUT_IDS: Final = ("alibi", "none")
"""Kinds of positions that need no ``position_ids``: they follow the mask, or there are none."""


def padding_refusal(model: Any, facts: ModelFacts) -> str:
    """Why prompts of unequal length cannot share a forward of this model; empty if they can."""
    if not all(layer.causal for layer in facts.layers):
        # Measured on PaliGemma with a fused kernel: with a mask its attention is causal, and without one it is not.
        return "its attention is not causal, and its modelling code treats prompts with and without a mask differently"
    if facts.model_type in _COUNTED_FROM_THE_END:
        return "its biases for distances are counted from the end of the longest prompt, and with them its scores"
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    per_kind = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    if any(found.get("rope_type") == "longrope" for found in per_kind):
        return "its rotary frequencies depend on the longest prompt of a batch (longrope)"
    return ""


def generation_refusal(model: Any, facts: ModelFacts, cache: Any) -> str:
    """Why prompts of unequal length cannot share a key/value cache of this model; empty if they can.

    Args:
        model: the transformers model.
        facts: what its configuration says.
        cache: an empty cache of its own kind.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if not facts.structure_known:
        return "the family's block structure is not known"
    if any(not layer.softmax or layer.compress_rate is not None for layer in facts.layers):
        return "not every layer is softmax attention over the tokens"
    kinds = {type(layer) for layer in cache.layers}
    if odd := sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer}):
        return f"its cache has layers of another kind ({', '.join(odd)})"
    if facts.model_type in _WIDENED:
        return "its modelling code widens the mask by image tokens, also where there is no image"
    if any(getattr(part, "attn_temperature_tuning", None) and not part.use_rope for part in model.modules()):
        # Llama 4's; a shorter prompt's columns in the cache are not its positions.
        return "its layers without rotary embedding scale queries by their column in the cache"
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if facts.positions not in _WITHOUT_IDS and not takes_positions:
        return "its forward takes no positions"
    if takes_positions and not _counts_from_zero(model):
        return "it does not take positions that are numbered from 0"
    return padding_refusal(model, facts)


def _counts_from_zero(model: Any) -> bool:
    """Whether positions 0 and 1, said, are to the last bit what the model takes the first two tokens' to be."""
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[1, 2]], device=device)
    said = torch.arange(2, device=device)[None]
    with torch.inference_mode(False), torch.no_grad():
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        try:
            return torch.equal(model(**inputs).logits, model(**inputs, position_ids=said).logits)
        except (AttributeError, RuntimeError, ValueError, TypeError, IndexError):
            # Such as a wrapper that wants to know where in the prompt its images are, once it is given a mask.
            return False


def forwards(requests: Sequence[ForwardRequest], *, unequal: bool) -> list[list[ForwardRequest]]:
    """Consecutive requests whose padded size stays within the limit; of one length unless ``unequal``."""
    batches: list[list[ForwardRequest]] = []
    longest = 0
    for request in requests:
        length = len(request.token_ids)
        same = unequal or length == longest
        longest = max(longest, length)
        if batches and same and longest * (len(batches[-1]) + 1) <= _MAX_TOKENS:
            batches[-1].append(request)
        else:
            batches.append([request])
            longest = length
    return batches


def generations(requests: Sequence[ForwardRequest], *, unequal: bool, longest: int | None) -> list[list[int]]:
    """Numbers of the requests that generate together, prompts of like length side by side.

    Args:
        requests: requests with sampling.
        unequal: whether prompts of unequal length may go together.
        longest: the longest sequence that the model takes, or ``None``.
    """
    found: list[list[int]] = []
    room = 0
    for i in sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids)):
        length, new = len(requests[i].token_ids), _new(requests[i])
        if found:
            room = max(room, new)
            fits = (len(found[-1]) + 1) * (length + room) <= _MAX_TOKENS
            fits = fits and (longest is None or length + room <= longest)
            if fits and (unequal or len(requests[found[-1][0]].token_ids) == length):
                found[-1].append(i)
                continue
        found.append([i])
        room = new
    return found


def aligned(prefilled: Any, lengths: Sequence[int], cache: Any) -> Any:
    """``cache``, filled with what ``prefilled`` holds of prompts that were padded on the right, padded on the left.

    Args:
        prefilled: a cache with one column per token, padding behind each prompt.
        lengths: tokens of each prompt.
        cache: an empty cache of the model's own kind; layers with a window keep only what they need.
    """
    for index, layer in enumerate(prefilled.layers):
        cache.update(_moved(layer.keys, lengths), _moved(layer.values, lengths), index)
    return cache


def _moved(columns: Tensor, lengths: Sequence[int]) -> Tensor:
    """``[batch, heads, column, width]`` with each row's own columns last, and zeros in front.

    Masked columns have no weight; but no weight times infinity, which padding may hold, would not be nothing.
    """
    out = columns.new_zeros(columns.shape)
    for row, length in enumerate(lengths):
        out[row, :, columns.shape[2] - length :] = columns[row, :, :length]
    return out


def _new(request: ForwardRequest) -> int:
    return 0 if request.sampling is None else request.sampling.max_tokens
