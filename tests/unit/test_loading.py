"""Loading: the ladder of backends, options, and every configuration that is no model, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, ViTConfig

from interp_core import (
    Availability,
    BackendSpec,
    BackendUnavailable,
    InterpModel,
    ModelUnavailable,
    OptionSpec,
    PluginHost,
    RequestError,
    hookimpl,
    inspect_model,
    load_model,
)
from interp_core.errors import InterpError


def spec(name: str, rank: int | None = 0, reason: str = "", **changes: Any) -> BackendSpec:
    probe = lambda: Availability(not reason, reason)  # noqa: E731 - one line says it
    return BackendSpec(name=name, summary="x", factory="nowhere:Backend", probe=probe, rank=rank, **changes)


def host_of(*specs: BackendSpec) -> PluginHost:
    class Plugin:
        @hookimpl
        def interp_backends(self) -> list[BackendSpec]:
            return list(specs)

    return PluginHost(discover=False, plugins=[("made_up", Plugin())])


OPTIONS = (
    OptionSpec(name="revision", help="x", types=(str,)),
    OptionSpec(name="size", help="x", types=(int,), default=3),
    OptionSpec(name="kind", help="x", types=(str,), default="a", choices=("a", "b")),
)
HOST = host_of(
    spec("best", 30, "its engine is missing"),
    spec("good", 20, options=OPTIONS),
    spec("fair", 10),
    spec("hidden", None),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    LlamaConfig(num_hidden_layers=2).save_pretrained(path)
    return path


def test_auto_takes_the_best_that_can_run_and_says_why_not_others(folder: Path) -> None:
    model = load_model(folder, host=HOST)
    assert model.backend == "good"
    passed = model.profile.passed_over
    assert set(passed) == {"best", "fair", "hidden"}
    assert passed["best"] == "its engine is missing"
    assert "'good' ranks higher" in passed["fair"]
    assert "never chosen automatically" in passed["hidden"]
    assert load_model(folder, "hidden", host=HOST).profile.passed_over == {}


def test_a_named_backend_that_cannot_run(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"'best'.*cannot run here: its engine is missing"):
        load_model(folder, "best", host=HOST)
    assert inspect_model(folder, "best", host=HOST).backend == "best"


def test_no_backend_can_run(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"no backend can run here.*a: no luck; b: never") as raised:
        load_model(folder, host=host_of(spec("a", 2, "no luck"), spec("b", 1, "never")))
    assert "no luck" in str(raised.value)
    assert inspect_model(folder, host=host_of(spec("a", 1, "no"), spec("b", 2, "never"))).backend == "b"


def test_no_backend_is_installed(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="pip install interp-eager"):
        load_model(folder, host=host_of())


@pytest.mark.parametrize(
    ("backend", "options", "kind", "said"),
    [
        ("goood", {}, BackendUnavailable, "'good'"),
        ("zzzz", {}, BackendUnavailable, "pip install interp-zzzz"),
        (3, {}, RequestError, "backend is a name"),
        ("good", {"revison": "x"}, RequestError, "Did you mean 'revision'?"),
        ("fair", {"revision": "x"}, RequestError, "unknown option 'revision'"),
        ("good", {"revision": 3}, RequestError, "'revision' is str"),
        ("good", {"size": "3"}, RequestError, "'size' is int"),
        ("good", {"size": True}, RequestError, "'size' is int"),
        ("good", {"size": None}, RequestError, "'size' is int"),
        ("good", {"kind": "c"}, RequestError, "Valid: a, b"),
        ("good", {"dtype": "float23"}, RequestError, "unknown dtype 'float23'. Did you mean"),
        ("good", {"trust_remote_code": 1}, RequestError, "'trust_remote_code' is bool"),
    ],
)
def test_what_cannot_be_asked_for(
    folder: Path, backend: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as raised:
        load_model(folder, backend, host=HOST, **options)
    assert said in str(raised.value)


def test_options_are_filled_in(folder: Path) -> None:
    options = load_model(folder, "good", host=HOST, revision=None, size=4, dtype="torch.bfloat16").profile.options
    assert options == {
        "dtype": "bfloat16",
        "device": None,
        "trust_remote_code": False,
        "revision": None,
        "size": 4,
        "kind": "a",
    }


def test_a_model_is_a_folder_or_an_id() -> None:
    for value in (None, 3, b"x"):
        with pytest.raises(RequestError, match="a folder or an id"):
            load_model(value, host=HOST)  # type: ignore[arg-type]


NOT_MODELS = {
    "no config": (None, "no config.json"),
    "empty": ("", "cannot be read as JSON"),
    "corrupt": ('{"model_type": "llama", ', "cannot be read as JSON"),
    "binary": (b"\xff\xfe\x00", "cannot be read as JSON"),
    "a list": ("[]", "not a JSON object"),
    "no type": ('{"hidden_size": 8}', "names no model_type"),
    "null type": ('{"model_type": null}', "names no model_type"),
    "unknown type": ('{"model_type": "made_up_7"}', "made_up_7"),
    "vision": (json.dumps(ViTConfig().to_dict()), "vit"),
    "wrong values": ('{"model_type": "llama", "hidden_size": "wide"}', ""),
}


@pytest.mark.parametrize("case", NOT_MODELS)
def test_what_is_no_model(tmp_path: Path, case: str) -> None:
    content, said = NOT_MODELS[case]
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelUnavailable) as raised:
        load_model(tmp_path, host=HOST)
    assert said in str(raised.value)


def test_a_folder_that_is_not_there_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="is not there"):
        load_model(tmp_path / "missing", host=HOST)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelUnavailable, match="is a file"):
        load_model(tmp_path / "file", host=HOST)


def test_an_empty_static_set_is_refused(folder: Path) -> None:
    with pytest.raises(InterpError, match=r"static_points=\[\] would declare nothing"):
        inspect_model(folder, "vllm-static", static_points=[])


def test_a_folder_without_weights_answers_and_cannot_be_warmed(folder: Path) -> None:
    with load_model(folder, "eager") as model:
        assert (model.n_layers, model.d_model) == (2, 4096)
        assert model.describe()
        assert repr(model).endswith("not loaded yet>")
        with pytest.raises(ModelUnavailable):
            model.warmup()
        assert not model.session.warm


def test_shutdown_twice_and_use_afterwards(folder: Path) -> None:
    model = load_model(folder, "good", host=HOST)
    model.shutdown()
    model.shutdown()
    assert model.n_layers == 2
    for use in (InterpModel.warmup, lambda m: m.generate([1], max_tokens=1)):
        with pytest.raises(BackendUnavailable, match="shut down"):
            use(model)


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    from transformers import Mamba2Config

    Mamba2Config(num_hidden_layers=2, time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert inspect_model(tmp_path, backend="eager").facts.n_layers == 2
