"""Quill on transformers: the conformance kit, and what is Quill's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from quill_checkpoint import save

from interp_core import CapabilityUnsupported, inspect_model, load_model, run_with_cache
from interp_core.testing import ArchitectureConformance, check_plugin, difference

torch.set_num_threads(1)


def test_the_plugin_keeps_every_static_rule() -> None:
    assert [finding for finding in check_plugin("quill") if not finding.ok] == []


class TestQuill(ArchitectureConformance):
    """Declared means tested, and what is not declared has to refuse."""

    architecture = "quill"
    backends = ("eager",)
    unproven: ClassVar[Any] = {
        "quench": "the gate's weights are needed: test_its_own_point_is_the_gate compares it with them"
    }

    def checkpoint(self, folder: Path) -> str:
        return save(folder / "quill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint."""
    return save(tmp_path_factory.mktemp("quill"))


def test_everything_is_answered_before_weights(folder: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(folder, "config.json").read_text())
    profile = inspect_model(tmp_path, backend="eager")
    assert profile.architecture_name == "quill"
    assert [layer.parallel for layer in profile.facts.layers] == [False, True, False, True]
    refused = profile.refusal("resid_mid.1")
    assert isinstance(refused, CapabilityUnsupported)
    assert "parallel" in refused.why


def test_its_own_point_is_the_gate(folder: str) -> None:
    """Of the MLP's input, which is damped by it."""
    with load_model(folder, backend="eager", dtype="float32") as model:
        cache = run_with_cache(model, [5, 6, 7, 8, 9], ["quench.2", "mlp_in.2", "mlp_pre.2"])
        forge = model.session.backend().model.rungs[2].forge  # type: ignore[attr-defined]
        damped = cache["mlp_in.2"] * torch.sigmoid(cache["quench.2"])
        assert difference(forge.heat(damped), cache["mlp_pre.2"]) < 1e-5
        assert difference(forge.heat(cache["mlp_in.2"]), cache["mlp_pre.2"]) > 0.1
