"""Facts of older decoders: halves of encoder-decoders, norms on the sums, and configurations that are no decoder."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from interp_core.errors import ModelUnavailable
from interp_core.facts import ModelFacts
from interp_core.facts_reader import read_facts
from interp_core.points import GENERAL_POINTS
from interp_core.presence import absences

HALVES = ("bart", "plbart", "mvp", "marian", "blenderbot-small", "mbart", "blenderbot", "bigbird_pegasus", "pegasus")
HALF: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_layers": 5,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 80,
    "is_encoder_decoder": False,
}


def facts(model_type: str, **values: Any) -> ModelFacts:
    return read_facts(transformers.CONFIG_MAPPING[model_type](**values))


@pytest.mark.parametrize("model_type", [*HALVES, "whisper"])
def test_a_decoder_s_sizes_are_not_the_encoder_s(model_type: str) -> None:
    found = facts(model_type, **HALF)
    assert (found.n_layers, found.n_heads, found.n_kv_heads, found.head_dim, found.d_mlp) == (5, 6, 6, 8, 80)
    assert found.structure_known


@pytest.mark.parametrize("model_type", [*HALVES, "whisper"])
def test_with_its_encoder_it_is_no_decoder(model_type: str) -> None:
    with pytest.raises(ModelUnavailable, match="encoder-decoder"):
        facts(model_type, **{**HALF, "is_encoder_decoder": True})


@pytest.mark.parametrize("model_type", HALVES)
def test_an_embedding_scale_is_the_configuration_s_word(model_type: str) -> None:
    assert facts(model_type, **HALF, scale_embedding=False).embedding_scale == 1.0
    found = facts(model_type, **HALF, scale_embedding=True)
    assert found.embedding_scale == pytest.approx(1.0 if model_type == "blenderbot-small" else 48**0.5)


def test_whisper_s_decoder_never_uses_the_scale_that_it_states() -> None:
    assert facts("whisper", **HALF, scale_embedding=True).embedding_scale == 1.0


def test_a_norm_on_the_embeddings_that_a_key_switches() -> None:
    assert facts("trocr", layernorm_embedding=True).embedding_norm
    assert not facts("trocr", layernorm_embedding=False).embedding_norm


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("bloom", {"slow_but_exact": True}),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}),
        ("git", {"chunk_size_feed_forward": 2}),
    ],
)
def test_forms_that_the_rows_do_not_describe(model_type: str, values: dict[str, Any]) -> None:
    assert facts(model_type).structure_known
    found = facts(model_type, **values)
    assert not found.structure_known
    (reason,) = absences(GENERAL_POINTS["resid_post"], found).values()
    assert next(iter(values)) in reason


def test_names_of_activations_are_what_the_code_understands() -> None:
    assert facts("openai-gpt").activation == "gelu_new"
    assert facts("openai-gpt", afn="silu").activation == "silu"
    assert (facts("ctrl").activation, facts("mpt").activation, facts("bloom").activation) == (
        "relu",
        "gelu",
        "gelu_new",
    )


BERTS = ("bert", "ernie", "roc_bert", "bert-generation", "electra", "rembert", "roformer", "roberta", "camembert")
BERTS += ("xlm-roberta", "data2vec-text", "megatron-bert", "roberta-prelayernorm", "xlm-roberta-xl")


@pytest.mark.parametrize("model_type", BERTS)
def test_one_that_sees_both_ways_is_no_decoder(model_type: str) -> None:
    with pytest.raises(ModelUnavailable, match="is_decoder=False: its attention sees both ways"):
        facts(model_type)
    assert facts(model_type, is_decoder=True).structure_known


def test_what_else_is_no_decoder_of_tokens() -> None:
    with pytest.raises(ModelUnavailable, match="attention_type='block_sparse': its attention sees both ways"):
        facts("big_bird", is_decoder=True)
    assert facts("big_bird", is_decoder=True, attention_type="original_full").structure_known
    with pytest.raises(ModelUnavailable, match="attn_type='bi': its attention sees both ways"):
        facts("xlnet")
    other = facts("xlnet", attn_type="uni")
    assert not other.structure_known
    assert "attn_type='uni'" in other.other_form
    with pytest.raises(ModelUnavailable, match="default_language"):
        facts("xmod", is_decoder=True)
    assert facts("xmod", is_decoder=True, default_language="en_XX").structure_known
    with pytest.raises(ModelUnavailable, match="4 rows of audio codes"):
        facts("musicgen_decoder", num_codebooks=4)
    assert facts("musicgen_decoder", num_codebooks=1).structure_known
    with pytest.raises(ModelUnavailable, match="several rows for each token"):
        facts("prophetnet", is_encoder_decoder=False)


def test_positions_are_counted_from_behind_the_padding_token() -> None:
    assert facts("roberta", is_decoder=True, max_position_embeddings=514, pad_token_id=1).max_positions == 512
    assert facts("bert", is_decoder=True, max_position_embeddings=512, pad_token_id=1).max_positions == 512


def test_an_embedding_of_another_width_is_absent_with_its_reason() -> None:
    assert facts("electra", is_decoder=True, embedding_size=256, hidden_size=256).embedding_width == 0
    found = facts("electra", is_decoder=True, embedding_size=128, hidden_size=256)
    (reason,) = absences(GENERAL_POINTS["embeddings"], found).values()
    assert "128" in reason
    assert "256" in reason
    assert not absences(GENERAL_POINTS["resid_pre"], found)


def test_a_residual_that_is_halved_between_blocks() -> None:
    found = facts("rwkv", num_hidden_layers=12, rescale_every=6)
    assert [found.halved_after(layer) for layer in range(12)] == [False] * 5 + [True] + [False] * 5 + [True]
    assert not any(facts("rwkv", rescale_every=0).halved_after(layer) for layer in range(12))


def test_a_tie_that_the_code_does_not_make() -> None:
    assert facts("pegasus", **HALF).tied_embeddings
    assert not facts("bigbird_pegasus", **HALF).tied_embeddings
