"""Engines for the tests of this folder: real ones, shared within a module."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_families
from trap_tools import BLOCK
from vllm_families import Loader

from interp_core import load_model
from interp_core.model import InterpModel

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    # Children that begin as copies of this process need not import vLLM again, which takes them ten seconds each.
    # What a user gets, new processes, has its own tests.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


@pytest.fixture(scope="module", autouse=True)
def quick_engines() -> Iterator[None]:
    """One thread, little cache, quick starts."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", _in_a_fork)
        with _nothing_to_collect(patch):
            yield


@contextmanager
def _nothing_to_collect(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines are copies of this process, and collect garbage as they start and end: not among what was copied."""
    thaw = gc.unfreeze
    patch.setattr(gc, "unfreeze", lambda: None)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        thaw()


def _in_a_fork(function: Callable[[], Any]) -> Any:
    """vLLM looks at each model class in a process apart, once per machine, and imports itself there anew."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


@pytest.fixture(scope="session")
def vllm_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's tiny checkpoint."""
    root: Path = tmp_path_factory.mktemp("vllm-checkpoints")
    return lambda family: vllm_families.save(family, root)


@pytest.fixture(scope="module")
def loaded(vllm_folders: Callable[[str], str], quick_engines: None) -> Iterator[Loader]:
    """Loads models of families, and shuts them down at the end of the module."""
    models: list[InterpModel] = []

    def load(family: str, backend: str = "vllm", **options: Any) -> InterpModel:
        if backend == "vllm":
            options = {"max_model_len": 256, **options}
        model = load_model(vllm_folders(family), backend=backend, dtype="float32", **options)
        models.append(model)
        return model

    yield load
    for model in models:
        model.shutdown()


@pytest.fixture(scope="module")
def engine(loaded: Loader) -> InterpModel:
    """A tiny Llama on vLLM, warm."""
    return loaded("llama").warmup()


@pytest.fixture(scope="module")
def reference(loaded: Loader) -> InterpModel:
    """The same Llama on eager."""
    return loaded("llama", "eager").warmup()


@pytest.fixture(scope="module")
def eager(loaded: Loader) -> InterpModel:
    """The same model on eager. Its tokens vary from step to step, unlike those of the tiny Llama."""
    return loaded("mistral", "eager").warmup()


@pytest.fixture(scope="module")
def chunked(loaded: Loader) -> InterpModel:
    """At most 32 rows in a step."""
    return loaded("mistral", max_num_batched_tokens=32, max_num_seqs=8, block_size=BLOCK).warmup()


@pytest.fixture(scope="module")
def sharing(loaded: Loader) -> InterpModel:
    """With a prefix cache."""
    return loaded("mistral", enable_prefix_caching=True, block_size=BLOCK).warmup()
