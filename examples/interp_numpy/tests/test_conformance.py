"""The suite that every backend is held to, over the kit's own tiny Llama."""

from __future__ import annotations

from interp_core.testing import BackendConformance, check_plugin


def test_the_plugin_keeps_every_static_rule() -> None:
    assert [finding for finding in check_plugin("numpy") if not finding.ok] == []


class TestNumpy(BackendConformance):
    """Declared means tested, and what is not declared has to refuse."""

    backend = "numpy"
    families = ("llama",)
