"""What this backend does not do is refused before work, by the core's own errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from interp_numpy_models import OTHERS, PROMPT
from safetensors.torch import load_file, save_file

from interp_core import (
    Add,
    BackendUnavailable,
    CapabilityUnsupported,
    ModelUnavailable,
    RequestError,
    inspect_model,
    load_model,
    run_with_cache,
)


@pytest.mark.parametrize("name", OTHERS)
def test_another_shape_is_refused_when_inspected_and_when_loaded(name: str, tmp_path: Path) -> None:
    config, said = OTHERS[name]
    config().save_pretrained(tmp_path)
    profile = inspect_model(tmp_path, backend="numpy")
    refused = profile.refusal("resid_post.1")
    assert isinstance(refused, CapabilityUnsupported)
    assert said in refused.why
    assert "backend='eager'" in refused.instead
    assert not any(spec.numpy.readable for spec in profile.points())
    model = load_model(tmp_path, backend="numpy")
    with pytest.raises(CapabilityUnsupported, match=said.split()[0]):
        run_with_cache(model, PROMPT, ["resid_post.1"])
    with pytest.raises(BackendUnavailable, match="backend='eager'"):
        model.generate(PROMPT, max_tokens=1)


def test_nothing_is_written(llama: Path) -> None:
    model = load_model(llama, backend="numpy")
    with pytest.raises(CapabilityUnsupported, match="only reads"), model.steer(Add("resid_post.1", torch.ones(48))):
        pass
    with pytest.raises(CapabilityUnsupported, match="records no graph"):
        run_with_cache(model, PROMPT, ["resid_post.1"], detach=False)
    assert not model.session.warm


def test_auto_never_chooses_it(llama: Path) -> None:
    profile = inspect_model(llama)
    assert profile.backend != "numpy"
    assert "name it to use it" in profile.passed_over["numpy"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "bfloat16"}, RequestError),
        ({"device": "cuda"}, BackendUnavailable),
        ({"revision": "x"}, RequestError),
    ],
)
def test_other_options_are_refused(options: dict[str, str], error: type[Exception], llama: Path) -> None:
    with pytest.raises(error):
        load_model(llama, backend="numpy", **options).warmup()


def test_other_rotary_scalings_are_refused(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackendUnavailable, match="yarn"):
        load_model(tmp_path, backend="numpy").warmup()


@pytest.mark.parametrize("fault", ["missing", "strange", "shape", "broken", "no file"])
def test_wrong_weights_are_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if fault == "missing":
        del tensors["model.norm.weight"]
    elif fault == "strange":
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    elif fault == "shape":
        tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, file)
    if fault == "broken":
        file.write_bytes(file.read_bytes()[:1000])
    elif fault == "no file":
        file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable):
        load_model(tmp_path, backend="numpy").warmup()
