"""One thread: two contend badly on small machines. And the tiny trunks, each made and loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from stream_tools import captured
from trunks import TRUNKS, save

from interp_core import Cache, InterpModel, load_model

torch.set_num_threads(1)


class Loaded(NamedTuple):
    """A trunk's name, its checkpoint, and the model on the eager backend."""

    name: str
    path: str
    model: InterpModel


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny checkpoints are."""
    return tmp_path_factory.mktemp("trunks")


@pytest.fixture(scope="session", params=TRUNKS)
def trunk(request: pytest.FixtureRequest, folders: Path) -> Iterator[Loaded]:
    """Each trunk of several streams in turn."""
    path = save(request.param, folders)
    with load_model(path, backend="eager", dtype="float32") as model:
        yield Loaded(request.param, path, model)


@pytest.fixture(scope="session")
def deepseek(folders: Path) -> Iterator[Loaded]:
    """DeepSeek-V4 alone."""
    path = save("deepseek_v4", folders)
    with load_model(path, backend="eager", dtype="float32") as model:
        yield Loaded("deepseek_v4", path, model)


@pytest.fixture(scope="session")
def llama(folders: Path) -> Iterator[InterpModel]:
    """A conventional decoder of one stream."""
    with load_model(save("llama", folders), backend="eager", dtype="float32") as model:
        yield model


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """Loader of transformers' own model of a checkpoint, one per checkpoint."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loaded: dict[str, Any] = {}

    def load(trunk: Loaded) -> Any:
        if trunk.path not in loaded:
            auto = AutoModelForImageTextToText if trunk.name == "glm5_next" else AutoModelForCausalLM
            loaded[trunk.path] = auto.from_pretrained(trunk.path, dtype=torch.float32).eval()
        return loaded[trunk.path]

    return load


@pytest.fixture(scope="session")
def plain(trunk: Loaded) -> Cache:
    """Everything of one run of each trunk, shared by the tests that only read."""
    return captured(trunk)
