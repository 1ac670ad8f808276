"""The distributions in the combinations that people install, as wheels outside the tree: each works by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.packaging.environment import ROOT, Environment, Wheels

NAMES = ("interp-core", "interp-eager", "interp-vllm", "interp-deepseek-v4")

# What each combination answers of a checkpoint, and what it does with it.
SMOKE = """
import json, sys
from interp_core import InterpError, inspect_model, load_model, run_with_cache
path, found = sys.argv[1], {}
for backend in ("eager", "vllm", "vllm-static"):
    try:
        found[backend] = inspect_model(path, backend=backend).facts.n_layers
    except InterpError as error:
        found[backend] = str(error)
try:
    with load_model(path, backend="eager", dtype="float32") as model:
        found["shape"] = list(run_with_cache(model, [5, 6, 7], ["resid_post.1"])["resid_post.1"].shape)
except InterpError as error:
    found["shape"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "names", [(), ("interp-eager",), ("interp-vllm",), NAMES[1:]], ids=["core", "eager", "vllm", "all"]
)
def test_a_combination_works(names: tuple[str, ...], wheels: Wheels, checkpoint: Path, tmp_path: Path) -> None:
    here = Environment(tmp_path)
    for name in ("interp-core", *names):
        here.install(wheels[name])
    rows = json.loads(here.run("-m", "interp_core.cli", "plugins", "--check", "--json"))["plugins"]
    assert [(row["distribution"], row["status"]) for row in rows] == [(name, "active") for name in sorted(names)]
    found = json.loads(here.run("-c", SMOKE, str(checkpoint)))
    for backend, distribution in (("eager", "interp-eager"), ("vllm", "interp-vllm"), ("vllm-static", "interp-vllm")):
        if distribution in names:
            assert found[backend] == 2
        else:
            assert distribution in found[backend]
    assert found["shape"] == [1, 3, 32] if "interp-eager" in names else "interp-eager" in found["shape"]


def test_source_archives_hold_what_a_wheel_is_made_of(tmp_path: Path) -> None:
    """``make dist`` builds them beside the wheels; one of them is built into a wheel again."""
    archives = {}
    for name in NAMES:
        command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
        subprocess.run([*command, str(Wheels.source(name))], check=True, capture_output=True, timeout=300)
        (archives[name],) = tmp_path.glob(f"{name.replace('-', '_')}-*.tar.gz")
    for name, archive in archives.items():
        with tarfile.open(archive) as file:
            inside = {member.partition("/")[2] for member in file.getnames()}
        assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= inside, name
    with tarfile.open(archives["interp-core"]) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    templates = {p.relative_to(source) for p in source.rglob("*.tmpl")}
    assert templates == {p.relative_to(ROOT) for p in (ROOT / "interp_core").rglob("*.tmpl")}
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "again")]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=300)
    assert len(list((tmp_path / "again").glob("interp_core-*.whl"))) == 1
