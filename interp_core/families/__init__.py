"""What the modelling code of a family does and its configuration does not say: data, one row per trunk.

Every row was read off the modelling source of transformers 5.19. A family without a row has its dimensions
read all the same, and its layer points refused: a guess here would be a right shape with a wrong tensor.
Left out on purpose: trunks with several residual streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from interp_core.families import decoders, hybrids, mixtures, older
from interp_core.family import UNKNOWN_FAMILY, Absence, FamilyFacts

__all__ = ["BARE_HEADS", "FAMILIES", "SCALED_HEADS", "UNKNOWN_FAMILY", "Absence", "FamilyFacts"]

FAMILIES: Final[Mapping[str, FamilyFacts]] = MappingProxyType(
    {**decoders.ROWS, **older.ROWS, **mixtures.ROWS, **hybrids.ROWS}
)
"""Facts by ``model_type`` of the trunk's own configuration."""

# A wrapper has an unembedding of its own, and most forget the factor or the cap of the text model they wrap.
BARE_HEADS: Final = frozenset(
    "audioflamingo3 aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu "
    "gemma3 glmasr got_ocr2 granite_speech granite_speech_plus idefics2 idefics3 internvl kimi_k25 lfm2_vl "
    "lighton_ocr llava llava_next llava_next_video llava_onevision mistral3 musicflamingo ovis2 paligemma "
    "pp_chart2table qianfan_ocr qwen2_audio qwen3_asr shieldgemma2 smolvlm video_llama_3 video_llava vipllava "
    "voxtral".split()
)
"""``model_type`` of wrappers whose logits are the bare unembed output, whatever the text model's own would be."""

SCALED_HEADS: Final = frozenset(
    "cohere_compass gemma4 gemma4_unified granite4_vision hyperclovax_vision_v2 inkling_mm_model muse_glimmer".split()
)
"""``model_type`` of wrappers that apply the factor, or the cap, of the text model."""
