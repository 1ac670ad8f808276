"""Importing is free: no engine is loaded, by the core or by any plugin's entry module, and it costs little."""

from __future__ import annotations

import json
import pkgutil
import statistics
import subprocess
import sys

import pytest

import interp_core

HEAVY = ("torch", "transformers", "vllm", "numpy")
ENTRIES = ("interp_eager.plugin", "interp_vllm.plugin", "interp_deepseek_v4.plugin")


def heavy_after(*statements: str) -> list[str]:
    code = "; ".join([*statements, f"import sys, json; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    found: list[str] = json.loads(done.stdout)
    return found


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(interp_core.__path__, "interp_core.")]
    return [name for name in found if not name.endswith("__main__")]


def test_the_core_loads_no_engine() -> None:
    assert heavy_after("import interp_core") == []


def test_no_module_of_the_core_loads_an_engine() -> None:
    assert len(modules()) > 40
    assert heavy_after(*(f"import {name}" for name in modules())) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_modules_are_light(entry: str) -> None:
    assert heavy_after(f"import {entry}") == []


def test_loading_all_plugins_loads_no_engine() -> None:
    assert heavy_after("import interp_core", "interp_core.default_host().load()") == []


def test_the_check_can_fail() -> None:
    assert "torch" in heavy_after("import interp_eager.collect")


def test_import_costs_at_most_two_and_a_half_times_attrs_and_pluggy() -> None:
    ratios = []
    for _ in range(5):
        code = "import attrs, pluggy, interp_core"
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True
        )
        cost = {line.split("|")[2].strip(): int(line.split("|")[1]) for line in done.stderr.splitlines()[1:]}
        base = cost["attrs"] + cost["pluggy"]
        ratios.append((base + cost["interp_core"]) / base)
    assert statistics.median(ratios) <= 2.5
