"""Facts of wrappers, of forms that a row does not describe, and what is refused as no decoder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from interp_core.errors import ModelUnavailable
from interp_core.facts_reader import read_facts
from tests.unit.configs import config, facts, plain

transformers.logging.set_verbosity_error()


# --- wrappers


@pytest.mark.parametrize(
    ("model_type", "path", "trunk"),
    [
        ("gemma3", "text_config", "gemma3_text"),
        ("llava", "text_config", "llama"),
        ("qwen2_5_vl", "text_config", "qwen2_5_vl_text"),
        ("qwen2_5_omni", "thinker_config.text_config", "qwen2_5_omni_text"),
        ("gemma3_text", "", "gemma3_text"),
    ],
)
def test_the_text_model_of_a_wrapper(model_type: str, path: str, trunk: str) -> None:
    found = facts(model_type)
    assert (found.outer_model_type, found.text_path, found.model_type) == (model_type, path, trunk)
    assert found.structure_known


def test_a_wrapper_that_hands_its_name_down_hides_no_text_model(tmp_path: Path) -> None:
    config("hunyuan_vl").save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read.text_config.model_type == "hunyuan_vl", "transformers itself writes it there"
    assert read_facts(read).model_type == "hunyuan_vl_text"


def test_wrappers_of_other_people() -> None:
    inner = plain(model_type="qwen2", num_hidden_layers=3)
    found = read_facts(SimpleNamespace(model_type="remote_chat", llm_config=inner))
    assert (found.text_path, found.n_layers, found.outer_model_type) == ("llm_config", 3, "remote_chat")
    nested = SimpleNamespace(model_type="outer", thinker_config=SimpleNamespace(text_config=inner))
    assert read_facts(nested).text_path == "thinker_config.text_config"


def test_a_factor_on_the_logits_is_the_wrappers_own_affair() -> None:
    text = plain(model_type="cohere", logit_scale=0.25)
    assert read_facts(text).logit_multiplier == 0.25
    bare = read_facts(SimpleNamespace(model_type="aya_vision", text_config=text))
    assert (bare.logit_multiplier, bare.structure_known) == (1.0, True)
    unknown = read_facts(SimpleNamespace(model_type="remote_chat", text_config=text))
    assert not unknown.structure_known, "nobody has read what that wrapper does with it"
    scaled = plain(model_type="hyperclovax", logits_scaling=8.0)
    kept = read_facts(SimpleNamespace(model_type="hyperclovax_vision_v2", text_config=scaled))
    assert (kept.logit_multiplier, kept.structure_known) == (8.0, True)


def test_the_whole_model_decides_whether_embeddings_are_tied() -> None:
    text = plain(model_type="llama", tie_word_embeddings=True)
    assert (
        read_facts(SimpleNamespace(model_type="w", text_config=text, tie_word_embeddings=False)).tied_embeddings
        is False
    )
    assert read_facts(SimpleNamespace(model_type="w", text_config=text)).tied_embeddings is True


# --- forms of a family that its row does not describe


def test_a_row_holds_only_for_the_form_that_it_describes() -> None:
    assert facts("opt").structure_known
    assert not facts("opt", do_layer_norm_before=False).structure_known
    assert not facts("opt", word_embed_proj_dim=512).structure_known
    assert not facts("gpt2", scale_attn_by_inverse_layer_idx=True).structure_known
    assert facts("hyperclovax", use_post_norm=True).attn_post_norm
    assert not facts("hyperclovax", use_post_norm=False).attn_post_norm


def test_parallel_blocks() -> None:
    def parallel(model_type: str, **values: Any) -> set[bool]:
        return {layer.parallel for layer in facts(model_type, **values).layers}

    assert parallel("gpt_neox") == {True}
    assert parallel("gpt_neox", use_parallel_residual=False) == {False}
    assert parallel("cohere") == parallel("gptj") == parallel("phi") == {True}
    assert parallel("falcon", parallel_attn=False) == {False}
    assert parallel("llama") == {False}


# --- refusals


@pytest.mark.parametrize("model_type", ["vit", "siglip_vision_model", "whisper", "t5", "bart"])
def test_what_is_no_decoder_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(ModelUnavailable) as refused:
        facts(model_type)
    message = str(refused.value)
    assert repr(model_type) in message
    assert "decoder" in message


@pytest.mark.parametrize(
    ("missing", "looked_for"),
    [("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("vocab_size", "vocab_size")],
)
def test_a_missing_dimension_is_named_with_what_was_looked_for(missing: str, looked_for: str) -> None:
    values = vars(plain())
    del values[missing]
    with pytest.raises(ModelUnavailable, match=looked_for) as refused:
        read_facts(SimpleNamespace(**values))
    assert "'plain'" in str(refused.value)


@pytest.mark.parametrize(
    "broken",
    [
        {"num_hidden_layers": 0},
        {"hidden_size": -1},
        {"vocab_size": "many"},
        {"vocab_size": True},
        {"layer_types": ["full_attention"]},
        {"layers_block_type": ["mamba"] * 9},
        {"is_encoder_decoder": True},
        {"num_key_value_heads": -2},
        {"num_attention_heads": 64},
    ],
)
def test_contradictions_are_one_error(broken: dict[str, Any]) -> None:
    with pytest.raises(ModelUnavailable, match="'plain'"):
        read_facts(plain(**broken))


def test_odd_values_are_not_stated_rather_than_fatal() -> None:
    odd = plain(head_dim="wide", num_experts=[], sliding_window="far", eos_token_id="</s>", rms_norm_eps=None)
    found = read_facts(odd)
    assert (found.head_dim, found.layers[0].mlp, found.layers[0].window, found.eos_token_ids) == (8, "dense", None, ())
    nonsense: tuple[Any, ...] = (None, 3, "llama", {})
    for nothing in nonsense:
        with pytest.raises(ModelUnavailable):
            read_facts(nothing)
