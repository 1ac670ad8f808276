"""Which tokens end a generation, from the checkpoint's own files."""

from __future__ import annotations

from interp_core.errors import ModelUnavailable
from interp_core.profile import ModelProfile
from interp_core.scalars import whole_number

__all__ = ["end_tokens"]


def end_tokens(profile: ModelProfile) -> frozenset[int]:
    """Ids of the generation configuration, or of the configuration where there is none.

    Raises:
        ModelUnavailable: the file is there and says something else than token ids.
    """
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(profile.model_id).eos_token_id
    except OSError:
        ends = None
    except ValueError as error:
        raise ModelUnavailable(f"{profile.model_id}: its generation_config.json is not valid: {error}") from error
    if ends is None:
        return frozenset(profile.facts.eos_token_ids)
    listed = ends if isinstance(ends, (list, tuple)) else [ends]
    if any(whole_number(end) is None for end in listed):
        raise ModelUnavailable(f"{profile.model_id}: the eos_token_id to generate with is {ends!r}, no token id")
    return frozenset(map(int, listed))
