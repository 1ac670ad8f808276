"""Which tokens end a generation, from the checkpoint's own files."""

from __future__ import annotations

from interp_core import checkpoint
from interp_core.errors import ModelUnavailable
from interp_core.profile import ModelProfile

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
    return checkpoint.end_tokens(profile.model_id, ends, profile.facts.eos_token_ids)
