"""An engine's life: its start and its end, whatever ends it; and refusals."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from vllm_families import PROMPTS, Loader

import interp_vllm.adapters
from interp_core import (
    Apply,
    BackendUnavailable,
    CapabilityUnsupported,
    ModelUnavailable,
    RequestError,
    inspect_model,
    load_model,
    run_with_cache,
)
from interp_core.checks import difference

pytestmark = pytest.mark.vllm

TIGHT = 1e-5


def test_dtype_auto_keeps_the_checkpoints_own(loaded: Loader, vllm_folders: Callable[[str], str]) -> None:
    with load_model(vllm_folders("qwen2"), "vllm", max_model_len=64) as model:
        rows = run_with_cache(model, PROMPTS[0], ["resid_post.1"])["resid_post.1"]
        assert rows.dtype == torch.float32
    with load_model(vllm_folders("qwen2"), "vllm", max_model_len=64, dtype="bfloat16") as model:
        half = run_with_cache(model, PROMPTS[0], ["resid_post.1", "attn_probs.1"])
        assert half["resid_post.1"].dtype == half["attn_probs.1"].dtype == torch.bfloat16
        assert TIGHT < difference(half["resid_post.1"].float(), rows) < 0.05


def test_options_are_checked_by_name_and_value_before_anything_starts(vllm_folders: Callable[[str], str]) -> None:
    folder = vllm_folders("llama")
    for options, words in (
        ({"max_model_length": 64}, "max_model_len"),
        ({"max_model_len": "64"}, "is int"),
        ({"enforce_eager": True}, "enforce_eager"),
        ({"model_impl": "vlm"}, "vllm"),
    ):
        with pytest.raises(RequestError, match=words):
            load_model(folder, "vllm", **options)
    with pytest.raises(BackendUnavailable, match="cuda"):
        load_model(folder, "vllm", device="cuda").warmup()
    with pytest.raises(ModelUnavailable, match="did not start"):
        load_model(folder, "vllm", max_model_len=100_000).warmup()
    model = load_model(folder, "vllm", max_model_len=64)
    with pytest.raises(CapabilityUnsupported, match="callable"):
        run_with_cache(model, PROMPTS[0], ["resid_post.1"], steering=[Apply("resid_post.1", lambda x: x)])
    assert not model.session.warm


def test_a_release_that_was_not_tested_and_one_that_is_not_there_are_refused_from_metadata(
    vllm_folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, words in (("0.33.1", "0.33.1 is installed"), (None, "not installed")):
        monkeypatch.setattr(interp_vllm.adapters, "installed_version", lambda version=version: version)
        with pytest.raises(BackendUnavailable, match=words):
            load_model(vllm_folders("llama"), "vllm")
        with pytest.raises(BackendUnavailable, match=words):
            interp_vllm.adapters.adapter()
        assert inspect_model(vllm_folders("llama"), "vllm").supports("resid_post.1")


def test_a_private_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from interp_vllm.adapters import v0_32

    monkeypatch.setattr(v0_32, "NAMES", (*v0_32.NAMES, ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.gone")))
    with pytest.raises(BackendUnavailable, match=r"GPUModelRunner\.gone"):
        interp_vllm.adapters.adapter()


def test_an_attention_feature_that_nobody_knows_is_refused_by_name(
    vllm_folders: Callable[[str], str], tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    config = json.loads((Path(vllm_folders("llama")) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "logn_attn": True}))
    profile = inspect_model(str(folder), "vllm")
    assert not profile.supports("attn_probs.1")
    assert "logn_attn" in str(profile.refusal("attn_scores.1"))
    assert profile.supports("z.1")
    assert inspect_model(str(folder), "eager").supports("attn_probs.1")
    assert inspect_model(vllm_folders("llama"), "vllm").supports("attn_probs.1")


@pytest.mark.parametrize(
    ("model_type", "points", "words"),
    [
        ("ministral3", ("attn_scores.1", "attn_probs.1"), "factor on queries"),
        ("diffllama", ("attn_scores.1", "attn_probs.1"), "two halves"),
        ("youtu", ("attn_scores.1", "attn_probs.1"), "latent"),
        ("nanochat", ("final_norm", "lm_head"), "twice"),
    ],
)
def test_what_cannot_be_rebuilt_of_a_family_is_refused_before_an_engine_starts(
    tmp_path: Path, model_type: str, points: tuple[str, ...], words: str
) -> None:
    transformers.CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    profile = inspect_model(str(tmp_path), "vllm")
    for point in points:
        assert words in str(profile.refusal(point))
        assert inspect_model(str(tmp_path), "eager").supports(point)
    assert profile.supports("z.1")


def test_a_factor_before_the_unembedding_is_not_left_out_silently(tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING["minicpm3"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # refused before it is read
    with pytest.raises(BackendUnavailable, match="leaves out the factor"):
        load_model(str(tmp_path), "vllm", model_impl="transformers").warmup()


def test_layers_of_a_head_are_not_left_out_silently(tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING["roberta"](is_decoder=True).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # refused before it is read
    with pytest.raises(BackendUnavailable, match="leaves out the layers"):
        load_model(str(tmp_path), "vllm").warmup()


def test_a_kernel_with_other_terms_than_the_configuration_is_not_run(
    vllm_folders: Callable[[str], str], tmp_path: Path
) -> None:
    """Transformers' Mistral has a window on every layer, which vLLM's own class may drop: the check sees it."""
    from interp_core.facts import LayerFacts, ModelFacts
    from interp_vllm.worker.attention import check_terms

    facts = ModelFacts.from_config(__import__("transformers").AutoConfig.from_pretrained(vllm_folders("llama")))
    layer: LayerFacts = facts.layers[0]
    right = {"scale": layer.head_dim**-0.5, "softcap": None, "window": None, "sinks": None, "alibi": None}
    check_terms(right, layer, facts)
    for name, value in (("scale", 0.5), ("softcap", 30.0), ("window", 8), ("sinks", torch.zeros(4)), ("alibi", [1.0])):
        with pytest.raises(BackendUnavailable, match="another attention"):
            check_terms({**right, name: value}, layer, facts)


@pytest.mark.real_model
def test_an_engine_that_is_killed_ends_whoever_waits_for_it(loaded: Loader) -> None:
    model = loaded("llama").warmup()
    # By the name that vLLM gives the process object: a process's title can be set only where nothing has moved the
    # environment that stands behind it in memory, which other tests of one run may have done.
    engine = next(child for child in multiprocessing.active_children() if child.name.startswith("EngineCore"))
    core = psutil.Process(engine.pid)
    family = [core, *core.children(recursive=True)]
    core.kill()
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=r"ended|failed"):
            model.generate(PROMPTS[0], max_tokens=2)
    model.shutdown()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_shutting_down_under_a_running_generation_is_an_error_and_not_a_wait(loaded: Loader) -> None:
    model = loaded("llama").warmup()
    steps = model.generate_stream(PROMPTS[0], max_tokens=200, ignore_eos=True)
    next(steps)
    model.shutdown()
    with pytest.raises(BackendUnavailable):
        for _ in steps:
            pass
    with pytest.raises(BackendUnavailable, match="shut down"):
        model.generate(PROMPTS[0], max_tokens=1)


def test_heads_that_the_kernel_has_not_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    """It would start, and end with the first request."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for backend in ("vllm", "vllm-generate"):
        with pytest.raises(BackendUnavailable, match="no kernel for heads of 16"):
            load_model(tmp_path, backend=backend, dtype="float32").warmup()
