"""vLLM under the conformance kit, as any author's backend: one model, and so one engine."""

from __future__ import annotations

import pytest

from interp_core.testing import BackendConformance


@pytest.mark.vllm
@pytest.mark.usefixtures("quick_engines")
class TestVllm(BackendConformance):
    backend = "vllm"
    families = ("llama",)
    tolerance = 1e-4
    options = {"max_model_len": 64}  # noqa: RUF012 - as an author writes it
