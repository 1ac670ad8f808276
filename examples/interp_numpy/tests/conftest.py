"""One thread, and the checkpoints that tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interp_numpy_models import write

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints go."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def llama(folder: Path) -> Path:
    """A tiny Llama with grouped heads, and biases everywhere."""
    return write("llama", folder)
