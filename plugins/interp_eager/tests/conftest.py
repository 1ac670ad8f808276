"""One thread: two contend badly on small machines. And the tiny models, each made and loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_families import save

from interp_core import InterpModel, load_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny checkpoints are."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def llama(folders: Path) -> Iterator[InterpModel]:
    """The tiny Llama."""
    with load_model(save("llama", folders), backend="eager", dtype="float32") as loaded:
        yield loaded


@pytest.fixture(scope="session")
def smollm() -> Iterator[InterpModel]:
    """The embedded real model, float32."""
    from interp_eager.demo_model import prepare

    with load_model(prepare(), backend="eager", dtype="float32") as loaded:
        yield loaded
