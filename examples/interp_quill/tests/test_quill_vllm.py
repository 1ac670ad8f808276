"""Quill on vLLM, as an out-of-tree model: the numbers of transformers, the identities, and every write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from quill_checkpoint import save

from interp_core import Add, InterpModel, load_model, run_with_cache
from interp_core.checks import difference

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 4, 5]]


@pytest.fixture(scope="module", autouse=True)
def quiet_and_small() -> Iterator[None]:
    """One thread, and engines that start quickly."""
    torch.set_num_threads(1)
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint."""
    return save(tmp_path_factory.mktemp("quill"))


@pytest.fixture(scope="module")
def eager(folder: str) -> Iterator[InterpModel]:
    """On transformers."""
    with load_model(folder, backend="eager", dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def vllm(folder: str) -> Iterator[InterpModel]:
    """On vLLM."""
    with load_model(folder, backend="vllm", dtype="float32", max_model_len=128) as model:
        yield model


def served(model: InterpModel, *, write: bool = False) -> list[str]:
    """Every address that is served."""
    layers = range(model.n_layers)
    names = [f"{s.name}.{i}" for s in model.points() if s.scope == "layer" for i in layers]
    names += [s.name for s in model.points() if s.scope == "trunk"]
    return [name for name in names if model.refusal(name, write=write) is None]


def finite(tensor: Any) -> Any:
    """Masked scores as zeros."""
    return torch.nan_to_num(tensor, neginf=0.0)


def test_identities_hold(eager: InterpModel, vllm: InterpModel) -> None:
    for model in (eager, vllm):
        found = model.verify()
        assert found.ok, found.failed()
        assert {"attn_out_post", "mlp_out_post", "z", "mlp_act"} <= {
            n for n, v in found.points.items() if v == "proven"
        }


def test_both_backends_read_and_write_the_same(eager: InterpModel, vllm: InterpModel) -> None:
    addresses = [a for a in served(vllm) if eager.refusal(a) is None]
    assert len(addresses) > 60
    found, wanted = (run_with_cache(m, PROMPTS, addresses) for m in (vllm, eager))
    assert max(difference(finite(found[a]), finite(wanted[a])) for a in addresses) < 1e-5
    for address in served(vllm, write=True):
        if address.rpartition(".")[2] not in ("1", "2", address):
            continue
        shape = torch.Size(vllm.profile.shape(vllm.address(address)))
        operation = Add(address, torch.sin(1.0 + torch.arange(shape.numel())).reshape(shape), scale=2.0)
        rows = [run_with_cache(m, PROMPTS, ["final_norm"], steering=[operation])["final_norm"] for m in (vllm, eager)]
        assert difference(*rows) < 1e-5, address


def test_generation(eager: InterpModel, vllm: InterpModel, folder: str) -> None:
    wanted = [c.token_ids for c in eager.generate(PROMPTS, max_tokens=6, ignore_eos=True)]
    assert [c.token_ids for c in vllm.generate(PROMPTS, max_tokens=6, ignore_eos=True)] == wanted
    with load_model(folder, backend="vllm-generate", dtype="float32", max_model_len=128) as plain:
        assert [c.token_ids for c in plain.generate(PROMPTS, max_tokens=6, ignore_eos=True)] == wanted
