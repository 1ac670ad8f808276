"""Deliberately broken plugins, built as real wheels and installed by pip: each contained, each listed.

Each test runs in a process of its own that has the wheels on its path, as a user's would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from tests.packaging.wheels import build_wheel, install_wheels

ROOT = Path(__file__).resolve().parents[2]


def source(backend: str, before: str = "", hook: str = "interp_backends") -> str:
    """The text of a plugin that brings one backend."""
    return f"""\
{before}
from interp_core.backend import BackendSpec
from interp_core.hookspecs import hookimpl


@hookimpl
def {hook}():
    return [BackendSpec(name={backend!r}, summary="Made up.", factory="nowhere:Engine")]
"""


@frozen
class Made:
    """One distribution of this test, and what is to become of it."""

    distribution: str
    entry: str
    text: str
    status: str
    reason: str = ""
    cause: str = ""
    requires: tuple[str, ...] = ("interp-core>=0.1,<0.2",)
    version: str = "1.0"
    module: str = field(init=False)

    @module.default
    def _module(self) -> str:
        return self.distribution.replace("-", "_")


RAISES = source("zz-boom", before="import zz_a_module_that_is_not_there")
EXITS = source("zz-exit", before="raise SystemExit('a plugin that wants out')")
HOOK_RAISES = """\
from interp_core.hookspecs import hookimpl


@hookimpl
def interp_backends():
    return 1 / 0
"""

MADE = (
    Made("zz-aaa-good", "zz_aaa", source("zz-good"), "active"),
    Made(
        "zz-boom",
        "zz_boom",
        RAISES,
        "failed",
        "ModuleNotFoundError: No module named",
        "ModuleNotFoundError",
        version="1.1",
    ),
    Made("zz-clash-one", "zz_clash_one", source("zz-clash"), "conflict", "'zz-clash' is claimed", "PluginConflict"),
    Made("zz-clash-two", "zz_clash_two", source("zz-clash"), "conflict", "'zz-clash' is claimed", "PluginConflict"),
    # Three names in a row, of which the middle one is declared twice.
    Made("zz-dup-first", "zz_dup_a", source("zz-first"), "active"),
    Made("zz-dup-one", "zz_dup_b", source("zz-dup"), "conflict", "zz-dup-one 1.0 and zz-dup-two 2.0", "PluginConflict"),
    Made(
        "zz-dup-two",
        "zz_dup_b",
        source("zz-dup"),
        "conflict",
        "zz-dup-one 1.0 and zz-dup-two 2.0",
        "PluginConflict",
        version="2.0",
    ),
    Made("zz-dup-last", "zz_dup_c", source("zz-last"), "active"),
    Made("zz-exit", "zz_exit", EXITS, "failed", "SystemExit: a plugin that wants out", "SystemExit"),
    Made("zz-hook", "zz_hook", HOOK_RAISES, "failed", "ZeroDivisionError", "ZeroDivisionError"),
    Made(
        "zz-misspelt",
        "zz_misspelt",
        source("zz-misspelt", hook="interp_backend"),
        "failed",
        "Did you mean 'interp_backends'?",
        "InvalidPlugin",
    ),
    Made(
        "zz-range",
        "zz_range",
        source("zz-range"),
        "incompatible",
        "requires interp-core>=99",
        "PluginUnavailable",
        requires=("interp-core>=99",),
    ),
    Made("zz-zzz-good", "zz_zzz", source("zz-better"), "active"),
)
BROKEN = [made for made in MADE if made.status != "active"]
ACTIVE_BACKENDS = {"zz-good", "zz-first", "zz-last", "zz-better"}

# What a user's process sees, as JSON. Only plugins of this test are let in, whatever else is installed.
LOAD = """\
import json, sys, warnings
from interp_core.host import PluginHost

host = PluginHost()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    host.load()
records = [r for r in host.records if r.distribution.startswith("zz-")]
missing = {name: host.explain_missing_backend(name) for name in sys.argv[1:]}
print(json.dumps({
    "records": [[r.name, r.distribution, r.version, r.requires_core, r.status, r.reason] for r in records],
    "backends": [name for name in host.backends if name.startswith("zz-")],
    "warnings": [str(w.message) for w in seen],
    "missing": {n: [type(e).__name__, type(e.__cause__).__name__, str(e)] for n, e in missing.items()},
    "imported": sorted(m for m in sys.modules if m.startswith("zz_")),
}))
"""

LIST = """\
import json, sys
from interp_core.host import list_plugins
print(json.dumps({
    "plugins": [{"distribution": r.distribution, "version": r.version, "status": r.status, "reason": r.reason}
                for r in list_plugins()],
}))
assert not [m for m in sys.modules if m.startswith("zz_")], "something was imported"
"""

# Every way to see the list without importing anything, each printing {"plugins": [...]}.
LISTINGS = {
    "list_plugins": ("-c", LIST),
    "interp plugins --json": ("-m", "interp_core.cli", "plugins", "--json"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed every wheel of this test."""
    wheels = [
        build_wheel(
            tmp_path_factory.mktemp(made.module),
            made.distribution,
            {f"{made.module}/__init__.py": "", f"{made.module}/plugin.py": made.text},
            entries={made.entry: f"{made.module}.plugin"},
            version=made.version,
            requires=made.requires,
        )
        for made in MADE
    ]
    target = tmp_path_factory.mktemp("site")
    install_wheels(wheels, target)
    return target


def run(site: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("INTERP_", "PYTHON"))}
    env = {**kept, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "INTERP_PLUGINS": ",".join(m.distribution for m in MADE)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=site,
        env={**env, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def seen_by_user(site: Path, *backends: str, **environ: str) -> Any:
    done = run(site, "-c", LOAD, *backends, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(site: Path) -> Any:
    return seen_by_user(
        site, "zz-boom", "zz-exit", "zz-range", "zz-misspelt", "zz-hook", "zz-clash", "zz-dup", "unheard-of"
    )


def test_every_plugin_is_listed_in_order_with_distribution_version_and_status(seen: Mapping[str, Any]) -> None:
    expected = [(made.entry, made.distribution, made.version, made.status) for made in MADE]
    assert [(name, dist, version, status) for name, dist, version, _, status, _ in seen["records"]] == expected


@pytest.mark.parametrize("made", BROKEN, ids=lambda made: made.distribution)
def test_each_broken_plugin_has_its_reason_and_one_warning(made: Made, seen: Mapping[str, Any]) -> None:
    (record,) = [record for record in seen["records"] if record[1] == made.distribution]
    assert made.reason in record[5]
    origin = f"of {made.distribution} {made.version} (with interp-core "
    (line,) = [line for line in seen["warnings"] if origin in line]
    assert made.reason in line
    assert f"[{made.cause}]" in line
    assert "INTERP_DISABLE_PLUGINS=" in line
    assert "\n" not in line


def test_the_good_ones_work_and_warn_of_nothing(seen: Mapping[str, Any]) -> None:
    assert set(seen["backends"]) == ACTIVE_BACKENDS
    assert len(seen["warnings"]) == len(BROKEN)
    for made in MADE:
        if made.status == "active":
            assert not [line for line in seen["warnings"] if made.distribution in line]


def test_what_metadata_rules_out_is_not_imported(seen: Mapping[str, Any]) -> None:
    for name in ("zz_dup_one", "zz_dup_two", "zz_range"):
        assert not [module for module in seen["imported"] if module.startswith(name)]
    assert "zz_hook.plugin" in seen["imported"]  # the control: modules that were imported do show


@pytest.mark.parametrize(
    ("backend", "cause"),
    [
        ("zz-boom", "ModuleNotFoundError"),
        ("zz-exit", "SystemExit"),
        ("zz-range", "PluginUnavailable"),
        ("zz-misspelt", "InvalidPlugin"),
        ("zz-hook", "ZeroDivisionError"),
        ("zz-clash", "PluginConflict"),
    ],
)
def test_a_request_for_what_it_owns_is_refused_from_the_stored_cause(
    backend: str, cause: str, seen: Mapping[str, Any]
) -> None:
    kind, chained, text = seen["missing"][backend]
    assert (kind, chained) == ("PluginUnavailable", cause)
    assert repr(backend) in text


def test_a_backend_that_nobody_owns_is_not_installed(seen: Mapping[str, Any]) -> None:
    kind, chained, text = seen["missing"]["unheard-of"]
    assert (kind, chained) == ("BackendUnavailable", "NoneType")
    assert "pip install interp-unheard)" in text


def test_one_of_two_with_the_same_name_works_when_the_other_is_switched_off(site: Path) -> None:
    seen = seen_by_user(site, INTERP_DISABLE_PLUGINS="zz-dup-two,zz_clash_one")
    assert set(seen["backends"]) == ACTIVE_BACKENDS | {"zz-dup", "zz-clash"}
    assert "zz_dup_one.plugin" in seen["imported"]
    assert not [module for module in seen["imported"] if module.startswith("zz_dup_two")]


def test_switching_off_every_broken_one_silences_everything(site: Path) -> None:
    seen = seen_by_user(site, INTERP_DISABLE_PLUGINS=",".join(made.distribution for made in BROKEN))
    assert seen["warnings"] == []
    assert set(seen["backends"]) == ACTIVE_BACKENDS


@pytest.mark.parametrize("way", LISTINGS)
def test_the_list_works_from_metadata_alone(way: str, site: Path) -> None:
    done = run(site, *LISTINGS[way])
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(done.stdout)["plugins"] if row["distribution"].startswith("zz-")]
    # What shows only when a plugin is imported is not known here.
    known = {"incompatible", "conflict"}
    expected = {
        made.distribution: made.status
        if made.status in known and not made.distribution.startswith("zz-clash")
        else "enabled"
        for made in MADE
    }
    assert {row["distribution"]: row["status"] for row in rows} == expected
    assert {row["distribution"]: row["version"] for row in rows} == {made.distribution: made.version for made in MADE}
    assert all(row["reason"] for row in rows if row["status"] in known)


def test_strict_raises_from_the_cause(site: Path) -> None:
    strict = {"INTERP_STRICT_PLUGINS": "1"}
    done = run(site, "-c", "from interp_core.host import PluginHost; PluginHost().load()", **strict)
    assert done.returncode == 1
    assert "PluginUnavailable" in done.stderr
    assert "direct cause" in done.stderr
    assert "zz_a_module_that_is_not_there" in done.stderr
    good = {**strict, "INTERP_PLUGINS": "zz-aaa-good,zz-zzz-good"}
    done = run(site, "-c", "from interp_core.host import PluginHost; PluginHost().load()", **good)
    assert done.returncode == 0, done.stderr


def test_pluggys_own_loader_is_stopped_by_the_same_wheels(site: Path) -> None:
    # Negative control of this whole file: the wheels really are broken, and somebody falls over them.
    stock = "import pluggy; pluggy.PluginManager('interp').load_setuptools_entrypoints('interp.plugins')"
    done = run(site, "-c", stock)
    assert done.returncode != 0
    assert "zz_a_module_that_is_not_there" in done.stderr or "wants out" in done.stderr
