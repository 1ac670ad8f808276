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


def test_a_tie_that_the_code_does_not_make() -> None:
    assert facts("pegasus", **HALF).tied_embeddings
    assert not facts("bigbird_pegasus", **HALF).tied_embeddings
