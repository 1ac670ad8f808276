"""The kit's static half: for each rule plugins that break it and are caught, and one that keeps all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path

import pytest
from wrong_static import RIGHT, WRONG

from interp_core.discovery import PluginEntry
from interp_core.errors import PluginUnavailable
from interp_core.testing import RULES, Finding, check_plugin

NUMBERS = count()
CASES = [(rule, source, words) for rule, listed in WRONG.items() for source, words in listed]


def findings(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, requires: str = "<0.2,>=0.1"
) -> dict[str, Finding]:
    """What the kit finds about a module of this source, which is not installed."""
    name = f"static_plugin_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    (folder / "onnxruntime.py").touch()  # An engine that costs nothing to import.
    monkeypatch.syspath_prepend(folder)
    found = check_plugin(PluginEntry(name, name, "interp-static", "1.0", requires))
    assert [finding.rule for finding in found] == list(RULES)
    return {finding.rule: finding for finding in found}


def test_a_right_plugin_keeps_every_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found for found in findings(RIGHT, tmp_path, monkeypatch).values() if not found.ok] == []


@pytest.mark.parametrize(("rule", "source", "words"), CASES, ids=[f"{r}-{i}" for i, (r, _, _) in enumerate(CASES)])
def test_a_wrong_plugin_is_caught(
    rule: str, source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = findings(source, tmp_path, monkeypatch)
    assert not found[rule].ok
    assert words in found[rule].message
    # What was asked before it is kept: the mistake is told once, where it is.
    order = list(RULES)
    earlier = [name for name in order[: order.index(rule)] if not found[name].ok]
    assert earlier == []


def test_transformers_keeps_registrations_where_the_kit_looks() -> None:
    from transformers import LlamaConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert "conformance" not in CONFIG_MAPPING._extra_content
    CONFIG_MAPPING.register("conformance", LlamaConfig)
    assert CONFIG_MAPPING._extra_content.pop("conformance") is LlamaConfig


@pytest.mark.parametrize("requires", ["", ">=0.1", "<0.2"])
def test_the_core_range_has_two_ends(requires: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings("NOTHING = 1", tmp_path, monkeypatch, requires)
    assert not found["core-range"].ok
    assert "write a range, such as interp-core>=0.1,<0.2" in found["core-range"].message


def test_every_rule_has_a_wrong_plugin() -> None:
    assert {*WRONG, "core-range"} == set(RULES)


def test_a_target_of_an_engine_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "static_engine.py").write_text("import an_engine_that_nobody_has")
    source = RIGHT.replace('"os.path:join"', '"static_engine:Engine"')
    found = findings(source, tmp_path, monkeypatch)["targets-resolve"]
    assert found.ok
    assert found.message.endswith("was not looked at: an_engine_that_nobody_has is not installed")


def test_an_unknown_name_lists_the_installed() -> None:
    with pytest.raises(PluginUnavailable, match=r"Did you mean 'eager'\?.*Installed: .*vllm \(interp-vllm 0\.1\.0\)"):
        check_plugin("egaer")


def interp(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interp_core.cli", "plugins", "verify", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=180, check=False
    )


def test_the_command_line_says_the_same() -> None:
    done = interp("interp-eager", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    assert {row["rule"]: row["means"] for row in told["findings"]} == dict(RULES)
    unknown = interp("egaer")
    assert unknown.returncode == 1
    assert "Did you mean 'eager'?" in unknown.stderr


def test_the_command_line_fails_for_a_broken_rule(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos.environ['MINE'] = '1'\n" + RIGHT)
    described = tmp_path / "interp_mine-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: interp-mine\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[interp.plugins]\nmine = mine\n")
    done = interp("mine", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "importing 'mine' changes the environment (os.environ)" in text
    assert "does not require interp-core" in text
    assert "it could not be asked, because a rule before it is not kept" in text
    assert "Traceback" not in done.stderr
