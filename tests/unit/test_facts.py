"""Facts read from configurations alone: values, defaults, refusals, and every class that transformers has."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.models.auto import modeling_auto

import interp_core.facts_reader as reader
from interp_core.errors import ModelUnavailable
from interp_core.facts import ModelFacts
from interp_core.facts_reader import read_facts
from interp_core.families import FAMILIES
from interp_core.points import GENERAL_POINTS
from interp_core.presence import absences
from tests.unit.configs import config, facts, plain

transformers.logging.set_verbosity_error()

CAUSAL = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WRAPPERS = tuple(
    dict.fromkeys(
        (
            *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        )
    )
)
# These classes have no defaults: transformers itself raises before we are asked.
WITHOUT_DEFAULTS = {"musicgen", "musicgen_melody", "vision-encoder-decoder"}


# --- every class that transformers has


@pytest.mark.parametrize("model_type", dict.fromkeys(CAUSAL + WRAPPERS))
def test_default_configurations_give_consistent_facts_or_one_error(model_type: str) -> None:
    try:
        instance = config(model_type)
    except Exception:  # noqa: BLE001 - configurations raise all kinds
        assert model_type in WITHOUT_DEFAULTS
        return
    try:
        found = read_facts(instance)
    except ModelUnavailable as refused:
        assert repr(instance.model_type) in str(refused)  # noqa: PT017 - either outcome is right
        return
    _check_consistent(found)


def _check_consistent(found: ModelFacts) -> None:
    assert found.n_layers == len(found.layers) > 0
    assert [layer.index for layer in found.layers] == list(range(found.n_layers))
    assert min(found.d_model, found.vocab_size, found.n_streams) > 0
    assert found.max_positions is None or found.max_positions > 0
    assert found.norm in ("rms", "layer")
    assert 0 < found.norm_eps < 1e-2
    for layer in found.layers:
        widths = (layer.n_heads, layer.n_kv_heads, layer.head_dim, layer.v_head_dim)
        assert min(widths) > 0 if layer.softmax else widths == (0, 0, 0, 0)
        assert not layer.softmax or layer.n_heads % layer.n_kv_heads == 0
        assert (layer.d_mlp > 0) == (layer.mlp == "dense")
        assert (layer.n_experts > 0) == (layer.mlp == "sparse")
        assert layer.top_k <= layer.n_experts
        assert layer.window is None or layer.window > 0
        assert layer.kv_shared_from is None or layer.kv_shared_from < layer.index
    assert not (found.structure_known and found.n_streams > 1)
    assert json.loads(json.dumps(found.describe()))["n_layers"] == found.n_layers


def test_the_sweep_finds_what_it_should() -> None:
    known, refused = set(), set()
    for model_type in dict.fromkeys(CAUSAL + WRAPPERS):
        if model_type not in WITHOUT_DEFAULTS:
            try:
                found = facts(model_type)
            except ModelUnavailable:
                refused.add(model_type)
            else:
                known |= {model_type} if found.structure_known else set()
    assert {"bart", "t5gemma2", "pi0", "bert", "big_bird", "prophetnet"} <= refused
    assert {"llama", "gemma3", "qwen2_5_vl", "llava", "fuyu"} <= known
    assert len(known) > 100
    assert len(refused) < 50


def test_every_row_belongs_to_a_model_type_that_exists() -> None:
    assert set(FAMILIES) <= set(transformers.CONFIG_MAPPING)


def test_the_default_configurations_of_the_rows() -> None:
    wanted = {
        "llama": (32, 4096, 32, 32, 128, 11008, 32000),
        "qwen2": (32, 4096, 32, 32, 128, 22016, 151936),
        "qwen3": (32, 4096, 32, 32, 128, 22016, 151936),
        "mistral": (32, 4096, 32, 8, 128, 14336, 32000),
        "gemma": (28, 3072, 16, 16, 256, 24576, 256000),
        "gemma2": (26, 2304, 8, 4, 256, 9216, 256000),
        "gemma3_text": (26, 2304, 8, 4, 256, 9216, 262208),
        "gpt2": (12, 768, 12, 12, 64, 3072, 50257),
        "gpt_neox": (44, 6144, 64, 64, 96, 24576, 50432),
        "olmo": (32, 4096, 32, 32, 128, 11008, 50304),
        "olmo2": (32, 4096, 32, 32, 128, 11008, 50304),
        "falcon": (32, 4544, 71, 1, 64, 18176, 65024),
        "gptj": (28, 4096, 16, 16, 256, 16384, 50400),
        "mixtral": (32, 4096, 32, 8, 128, 0, 32000),
    }
    for model_type, numbers in wanted.items():
        f = facts(model_type)
        got = (f.n_layers, f.d_model, f.n_heads, f.n_kv_heads, f.head_dim, f.d_mlp, f.vocab_size)
        assert got == numbers, model_type


# --- what is read from where


def test_nothing_but_attributes_is_needed() -> None:
    found = read_facts(plain())
    assert (found.n_layers, found.d_model, found.head_dim, found.n_kv_heads, found.d_mlp) == (2, 32, 8, 4, 80)
    assert not found.structure_known
    assert read_facts(plain(model_type="llama")).structure_known


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}, {"num_key_value_heads": None}])
def test_absent_and_empty_keys_take_the_default(absent: dict[str, Any]) -> None:
    found = read_facts(plain(**absent))
    assert (found.head_dim, found.n_kv_heads, found.v_head_dim) == (8, 4, 8)


def test_a_key_that_raises_is_not_stated() -> None:
    class Raises(SimpleNamespace):
        @property
        def head_dim(self) -> int:
            raise RuntimeError("per layer")

        @property
        def num_kv_shared_layers(self) -> int:
            raise KeyError("not yet")

    found = read_facts(Raises(**vars(plain())))
    assert (found.head_dim, found.layers[0].kv_shared_from) == (8, None)


def test_widths_per_layer() -> None:
    found = facts("gemma4_text", num_hidden_layers=6)
    assert [layer.head_dim for layer in found.layers] == [256] * 5 + [512]
    with pytest.raises(Exception, match="per-layer"):
        _ = config("gemma4_text").head_dim  # the control: the configuration itself does not answer
    own = facts("llama", num_hidden_layers=3, per_layer_config={1: {"intermediate_size": 7, "num_key_value_heads": 4}})
    assert [(layer.d_mlp, layer.n_kv_heads) for layer in own.layers] == [(11008, 32), (7, 4), (11008, 32)]


def test_windows_as_the_configurations_resolve_them() -> None:
    def windows(model_type: str, **values: Any) -> list[int | None]:
        return [layer.window for layer in facts(model_type, num_hidden_layers=4, **values).layers]

    assert windows("mistral", sliding_window=7) == [7] * 4
    assert windows("mistral", sliding_window=None) == [None] * 4
    assert windows("qwen2", sliding_window=7) == [None] * 4, "set, but not switched on"
    assert windows("qwen2", sliding_window=7, use_sliding_window=True, max_window_layers=3) == [None, None, None, 7]
    assert windows("qwen2_moe", sliding_window=7, use_sliding_window=False) == [None] * 4
    assert windows("gemma2", sliding_window=7) == [7, None, 7, None]
    assert windows("llama", sliding_window=7) == [None] * 4, "its code reads no window"
    chunked = facts("llama4_text", num_hidden_layers=4, attention_chunk_size=9)
    assert [(layer.mixer, layer.window) for layer in chunked.layers][-2:] == [
        ("chunked_attention", 9),
        ("full_attention", None),
    ]


def test_kinds_of_mixers() -> None:
    def mixers(model_type: str, **values: Any) -> list[str]:
        return [layer.mixer for layer in facts(model_type, **values).layers]

    assert set(mixers("mamba")) == {"state_space"}
    assert mixers("jamba")[3:6] == ["state_space", "full_attention", "state_space"]
    assert mixers("qwen3_next")[2:4] == ["linear_attention", "full_attention"]
    assert mixers("recurrent_gemma")[:3] == ["recurrent", "recurrent", "sliding_attention"]
    assert mixers("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]) == [
        "convolution",
        "full_attention",
    ]
    assert facts("mllama").layers[3].mixer == "cross_attention"
    blocks = facts("nemotron_h").layers
    assert [(layer.mixer, layer.mlp) for layer in blocks] == [
        ("state_space", "none"),
        ("none", "sparse"),
        ("full_attention", "none"),
        ("none", "dense"),
    ]


def test_words_of_layers_that_mean_two_things() -> None:
    """A block of attention and a state space, or attention with a convolution's state beside its keys."""
    shared = facts("zamba", num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"]).layers
    assert [(layer.mixer, layer.softmax, layer.mlp) for layer in shared] == [
        ("state_space", False, "none"),
        ("hybrid", True, "dense"),
    ]
    assert shared[1].attn_scale == pytest.approx((shared[1].head_dim / 2) ** -0.5)
    assert {"attn_in", "resid_mid", "mlp_out_post"} <= set(shared[1].absent)
    assert not shared[0].absent
    kinds = ["hybrid_sliding", "hybrid"]
    convolved = facts("inkling_text", num_hidden_layers=2, layer_types=kinds, mlp_layer_types=["dense"] * 2).layers
    assert [(layer.mixer, layer.window) for layer in convolved] == [
        ("sliding_attention", 512),
        ("full_attention", None),
    ]


def test_factors_by_role_and_by_kind_of_mixer() -> None:
    found = facts(
        "minimax",
        num_hidden_layers=2,
        layer_types=["full_attention", "linear_attention"],
        full_attn_alpha_factor=1.1,
        linear_attn_beta_factor=0.8,
        mlp_beta_factor=0.9,
        mlp_alpha_factor=1,
        linear_attn_alpha_factor=1,
        full_attn_beta_factor=1,
    )
    assert [dict(layer.factors) for layer in found.layers] == [
        {"attn_skip": 1.1, "mlp": 0.9},
        {"attn": 0.8, "mlp": 0.9},
    ]
    other = facts("falcon_h1", ssm_out_multiplier=0.9, attention_out_multiplier=0.6, mlp_multipliers=[0.8, 0.7])
    assert other.layers[0].factors == {"attn.beside": 0.9, "attn": 0.6, "mlp.gate_proj": 0.8}
    assert other.layers[0].second_mixer == "state_space"
    assert not facts("llama").layers[0].factors


def test_a_root_kept_in_bfloat16_is_rounded_to_it() -> None:
    import torch

    for width in (48, 2560, 64):
        kept = float(torch.tensor(width**0.5, dtype=torch.bfloat16))
        assert facts("recurrent_gemma", hidden_size=width).embedding_scale == kept
    assert facts("recurrent_gemma", hidden_size=48).embedding_scale != 48**0.5


def test_a_trunk_without_blocks_says_why_no_layer_point_is_there() -> None:
    found = facts("hrm_text")
    reasons = {name: absences(spec, found) for name, spec in GENERAL_POINTS.items()}
    assert "run in a loop" in reasons["resid_post"][None]
    assert "runs several times" in reasons["final_norm"][None]
    assert not reasons["embeddings"]
    assert not reasons["lm_head"]
    with pytest.raises(ModelUnavailable, match="sees both ways"):
        facts("xlm")
    assert "four lists" in absences(GENERAL_POINTS["z"], facts("xlm", causal=True))[None]


def test_norms_that_differ_between_kinds_of_blocks() -> None:
    found = facts("olmo_hybrid", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    assert found.norms(0) == {"attn_pre_norm", "mlp_pre_norm"}
    assert found.norms(1) == {"attn_post_norm", "mlp_post_norm"}
    assert facts("llama").norms(0) == {"attn_pre_norm", "mlp_pre_norm"}


def test_which_layers_are_sparse() -> None:
    def sparse(model_type: str, **values: Any) -> list[int]:
        layers = facts(model_type, num_hidden_layers=6, **values).layers
        return [layer.index for layer in layers if layer.mlp == "sparse"]

    assert sparse("glm4_moe", first_k_dense_replace=2) == [2, 3, 4, 5]
    assert sparse("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2) == [3, 5]
    assert sparse("jamba", expert_layer_period=3, expert_layer_offset=1) == [1, 4]
    assert sparse("ernie4_5_moe", moe_layer_start_index=1, moe_layer_end_index=4, moe_layer_interval=2) == [1, 3]
    assert sparse("mellum", mlp_layer_types=["dense", "sparse"] * 3) == [1, 3, 5]
    assert sparse("lfm2_moe", layer_types=["conv"] * 6, num_dense_layers=5) == [5]
    assert sparse("mixtral") == [0, 1, 2, 3, 4, 5]
    assert sparse("llama") == []


def test_factors() -> None:
    granite = facts(
        "granite", embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0, attention_multiplier=0.1
    )
    assert (granite.embedding_scale, granite.embedding_scale_inside) == (12.0, False)
    assert (granite.residual_multiplier, granite.logit_multiplier, granite.attn_scale) == (0.22, 0.125, 0.1)
    assert facts("hyperclovax", logits_scaling=8.0).logit_multiplier == 8.0, "the same key multiplies here"
    assert facts("cohere", logit_scale=0.25).logit_multiplier == 0.25
    gemma = facts("gemma2", hidden_size=64, query_pre_attn_scalar=16)
    assert (gemma.embedding_scale, gemma.embedding_scale_inside, gemma.attn_scale) == (8.0, True, 0.25)
    assert (gemma.attn_softcap, gemma.final_softcap) == (50.0, 30.0)
    assert facts("llama").attn_scale is None
    minicpm = facts("minicpm3", num_hidden_layers=4, hidden_size=80, dim_model_base=16, scale_depth=1.4, scale_emb=3.0)
    assert (minicpm.residual_multiplier, minicpm.head_scale) == (0.7, pytest.approx(0.2))
    assert (minicpm.embedding_scale, minicpm.embedding_scale_inside, minicpm.logit_multiplier) == (3.0, True, 1.0)


def test_a_stretched_rotary_embedding_scales_latent_attention_too() -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 40.0,
        "rope_theta": 1e4,
        "mscale": 1.0,
        "original_max_position_embeddings": 4,
    }
    stretched = facts("deepseek_v3", rope_parameters={**yarn, "mscale_all_dim": 1.0})
    assert stretched.attn_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)
    assert facts("deepseek_v3", rope_parameters={**yarn, "mscale_all_dim": 0.0}).attn_scale is None
    assert facts("llama", rope_parameters={**yarn, "mscale_all_dim": 1.0}).attn_scale is None, "its code does not"


def test_points_that_a_family_has_not_say_why() -> None:
    for model_type in ("hunyuan_v1_dense", "nanochat"):
        found = facts(model_type)
        assert set(found.absent) == {"q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"}
        assert absences(GENERAL_POINTS["k_norm_in"], found) == {None: found.absent["k_norm_in"]}
        assert "after the rotary embedding" in found.absent["q_norm_out"]
    assert absences(GENERAL_POINTS["k_norm_in"], facts("llama")) == {None: "this family has no query and key norms"}
    m3 = facts("minimax_m3_vl_text", num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"])
    assert [(layer.key_budget, layer.key_block) for layer in m3.layers] == [(None, 1), (16, 128)]
    assert "minimax_m3_sparse" in {layer.mixer for layer in m3.layers}
    limited = facts("step3p7", text_config={"num_hidden_layers": 2, "swiglu_limits_shared": [0, 7.0]})
    assert limited.activation == "silu with limits"
    assert facts("mllama").last_layer == 39
    longcat = facts("longcat_flash", num_layers=3)
    assert (longcat.n_layers, config("longcat_flash", num_layers=3).num_hidden_layers) == (3, 6), "halves are counted"
    assert absences(GENERAL_POINTS["resid_post"], longcat) == {}
    assert "two attentions" in absences(GENERAL_POINTS["z"], longcat)[None]
    modern = facts("modernbert-decoder", num_hidden_layers=3)
    assert [modern.norms(i) for i in range(2)] == [{"mlp_pre_norm"}, {"attn_pre_norm", "mlp_pre_norm"}]
    assert (modern.embedding_norm, modern.head_transform) == (True, True)
    assert [layer.key_budget for layer in facts("deepseek_v32", index_topk=9, num_hidden_layers=2).layers] == [9, 9]
    assert facts("deepseek_v3").layers[0].key_budget is None


def test_streams_are_seen_by_their_keys_and_never_claimed() -> None:
    for key in ("hc_mult", "hc_count", "altup_num_inputs"):
        found = read_facts(plain(model_type="llama", **{key: 4}))
        assert (found.n_streams, found.structure_known) == (4, False)
    assert read_facts(plain(model_type="llama", hc_mult=1)).structure_known


def test_special_ids_dtype_and_quantisation() -> None:
    found = facts("llama", eos_token_id=[7, 9], bos_token_id=3, dtype="bfloat16", tie_word_embeddings=True)
    assert (found.eos_token_ids, found.bos_token_id, found.dtype) == ((7, 9), 3, "bfloat16")
    assert (found.tied_embeddings, found.quantization) == (True, None)
    assert facts("llama", eos_token_id=None).eos_token_ids == ()
    packed = facts("llama", quantization_config={"quant_method": "fp8"}, architectures=["LlamaForCausalLM"])
    assert (packed.quantization, packed.architecture) == ("fp8", "LlamaForCausalLM")


def test_longest_sequences() -> None:
    assert facts("gpt2").max_positions == 1024
    assert facts("mamba").max_positions is None
    assert facts("falcon", alibi=True).max_positions is None
    assert (facts("falcon", alibi=True).positions, facts("falcon").positions) == ("alibi", "rotary")


# --- the modules themselves


def _imports(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_reading_facts_imports_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "vllm"}
    use = (
        "from types import SimpleNamespace as N; from interp_core.facts import ModelFacts; "
        "import interp_core.families; values = dict(num_hidden_layers=1, hidden_size=8, vocab_size=9); "
        "ModelFacts.from_config(N(model_type='llama', num_attention_heads=1, **values))"
    )
    assert not heavy & _imports(use)
    assert "transformers" in _imports("import transformers"), "the control: this check can fail"


def test_unusual_trunks_are_known_by_their_keys_and_not_by_name() -> None:
    folder = Path(reader.__file__).parent
    for path in (*folder.glob("facts*.py"), folder / "family.py", *folder.glob("families/*.py")):
        text = path.read_text(encoding="utf-8").lower()
        for name in ("deepseek_v4", "deepseek-v4", "gemma3n", "qwen4", "glm5", "hy_v4"):
            assert name not in text, f"{path.name} names {name}"


def test_records_are_frozen() -> None:
    found = facts("llama")
    with pytest.raises(AttributeError):
        found.n_layers = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        found.layers[0].mixer = "none"  # type: ignore[misc]
    assert not dataclasses.is_dataclass(found)
