"""Our own plugins under the kit, as anybody's: the static half of all, the behaviour half of eager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from interp_core.testing import BackendConformance, Finding, check_plugin


@pytest.mark.parametrize("name", ["eager", "vllm", "deepseek_v4"])
def test_static_rules(name: str) -> None:
    broken: list[Finding] = [finding for finding in check_plugin(name) if not finding.ok]
    assert broken == []


class TestEager(BackendConformance):
    backend = "eager"


def test_eager_with_gradients(tmp_path: Path) -> None:
    class WithGradients(BackendConformance):
        backend = "eager"
        options: ClassVar[Mapping[str, Any]] = {"requires_grad": True}

    subject = WithGradients().subject_for(("eager", "llama"), tmp_path)
    try:
        assert subject.profile.supports("gradients")
        WithGradients().test_declared_capabilities_work(subject)
    finally:
        subject.close()
