"""Tiny random checkpoints of older decoders: norms on the sums, residuals inside modules, halves of encoder-decoders.

Sizes of encoders differ from those of the decoders, so that neither is taken for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

__all__ = ["OLDER", "rwkv"]

_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_OLD = {"vocab_size": 300, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64}
_HALVES = {
    "vocab_size": 300,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
    **_ENDS,
}
_SCALED = {**_HALVES, "scale_embedding": True}

_BERT = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 67,
    "is_decoder": True,
    **_ENDS,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

OLDER: dict[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomConfig(vocab_size=300, hidden_size=48, n_layer=4, n_head=4, **_ENDS),
    "mpt": lambda: hf.MptConfig(vocab_size=300, d_model=48, n_heads=4, n_layers=4, max_seq_len=64, **_ENDS),
    "ctrl": lambda: hf.CTRLConfig(**_OLD, dff=80),
    "openai-gpt": lambda: hf.OpenAIGPTConfig(**_OLD),
    "bart": lambda: hf.BartConfig(**_SCALED),
    "plbart": lambda: hf.PLBartConfig(**_HALVES),
    "mvp": lambda: hf.MvpConfig(**_SCALED),
    "marian": lambda: hf.MarianConfig(**_SCALED),
    "blenderbot-small": lambda: hf.BlenderbotSmallConfig(**_SCALED),
    "trocr": lambda: hf.TrOCRConfig(
        vocab_size=300,
        d_model=48,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=80,
        max_position_embeddings=64,
        scale_embedding=True,
        **_ENDS,
    ),
    "mbart": lambda: hf.MBartConfig(**_SCALED),
    "blenderbot": lambda: hf.BlenderbotConfig(**_SCALED),
    "bigbird_pegasus": lambda: hf.BigBirdPegasusConfig(**_SCALED),
    "pegasus": lambda: hf.PegasusConfig(**_SCALED),
    "whisper": lambda: hf.WhisperConfig(
        **{k: v for k, v in _SCALED.items() if k != "max_position_embeddings"}, max_target_positions=64
    ),
    "bert": lambda: hf.BertConfig(**_BERT),
    "ernie": lambda: hf.ErnieConfig(**_BERT, use_task_id=True),
    "roc_bert": lambda: hf.RoCBertConfig(
        **_BERT, pronunciation_vocab_size=20, shape_vocab_size=20, pronunciation_embed_dim=8, shape_embed_dim=8
    ),
    "bert-generation": lambda: hf.BertGenerationConfig(**_BERT),
    "git": lambda: hf.GitConfig(
        **{k: v for k, v in _BERT.items() if k != "is_decoder"},
        vision_config={**_VISION, "image_size": 16, "patch_size": 8},
    ),
    "big_bird": lambda: hf.BigBirdConfig(**_BERT, attention_type="original_full", rescale_embeddings=True),
    "electra": lambda: hf.ElectraConfig(**_BERT, embedding_size=48),
    "electra-narrow": lambda: hf.ElectraConfig(**_BERT, embedding_size=24),
    "rembert": lambda: hf.RemBertConfig(**_BERT, input_embedding_size=24, output_embedding_size=32),
    "roformer": lambda: hf.RoFormerConfig(**_BERT),
    "roberta": lambda: hf.RobertaConfig(**_BERT),
    "camembert": lambda: hf.CamembertConfig(**_BERT),
    "xlm-roberta": lambda: hf.XLMRobertaConfig(**_BERT),
    "data2vec-text": lambda: hf.Data2VecTextConfig(**_BERT),
    "xmod": lambda: hf.XmodConfig(**_BERT, languages=["en", "de"], default_language="de"),
    "megatron-bert": lambda: hf.MegatronBertConfig(**_BERT),
    "roberta-prelayernorm": lambda: hf.RobertaPreLayerNormConfig(**_BERT),
    "xlm-roberta-xl": lambda: hf.XLMRobertaXLConfig(**_BERT),
}


def rwkv() -> Any:
    """A recurrence in place of attention, with a residual that is halved in between."""
    return hf.RwkvConfig(
        vocab_size=300, hidden_size=48, num_hidden_layers=4, context_length=64, intermediate_size=80, rescale_every=2
    )
