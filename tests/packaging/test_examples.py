"""Plugins that somebody else could have written: each comes, passes its own tests, and goes, as an installed wheel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from attrs import frozen

from tests.packaging.environment import Environment, Wheels, private_imports

# Everything that plugins may add a name to, and what auto chooses.
ASK = """
import json
from interp_core.host import default_host
from interp_core.loading import choose_backend
host = default_host()
host.load()
names = [["plugin", record.name] for record in host.records if record.status == "active"]
names += [[kind, name] for kind in ("backends", "architectures", "capabilities") for name in getattr(host, kind)]
names += [["points", point.name] for a in host.architectures.values() for point in a.points]
names += [["auto", choose_backend("auto", host, runnable=True)[0].name]]
print(json.dumps(names))
"""


@frozen(kw_only=True)
class Example:
    """One of the folders in ``examples``.

    Attributes:
        distribution: its name.
        needs: distributions of this project that its tests use, beside the core.
        brings: every name that it adds, by where.
        deselected: arguments of pytest that leave out what needs more than is installed here.
        at_least: how many of its tests pass, so that leaving out is noticed.
    """

    distribution: str
    needs: tuple[str, ...] = ("interp-eager",)
    brings: frozenset[tuple[str, str]]
    deselected: tuple[str, ...] = ()
    at_least: int


EXAMPLES = [
    Example(
        distribution="interp-numpy",
        brings=frozenset({("plugin", "numpy"), ("backends", "numpy")}),
        at_least=45,
    ),
    Example(
        distribution="interp-quill",
        needs=("interp-eager", "interp-vllm"),
        brings=frozenset({("plugin", "quill"), ("architectures", "quill"), ("points", "quench")}),
        at_least=25,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.distribution)
def test_it_comes_works_and_goes(example: Example, wheels: Wheels, tmp_path: Path) -> None:
    here = Environment(tmp_path)
    for name in ("interp-core", *example.needs):
        here.install(wheels[name])
    package = example.distribution.replace("-", "_")
    plugin = next(name for kind, name in example.brings if kind == "plugin")

    def names() -> set[tuple[str, str]]:
        return {(kind, name) for kind, name in json.loads(here.run("-c", ASK))}

    before = names()
    assert not before & example.brings

    here.install(wheels[example.distribution])
    rows = json.loads(here.run("-m", "interp_core.cli", "plugins", "--check", "--json"))["plugins"]
    (row,) = [row for row in rows if row["name"] == plugin]
    assert (row["distribution"], row["status"]) == (example.distribution, "active")
    assert names() == before | example.brings

    # Its tests alone, so that nothing but the installed package can be what they test.
    source, copy = wheels.source(example.distribution), tmp_path / "copy"
    shutil.copytree(source / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "pyproject.toml", copy)
    done = here.test(str(copy), *example.deselected)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) >= example.at_least

    here.uninstall(package)
    assert names() == before
    assert plugin not in [
        row["name"] for row in json.loads(here.run("-m", "interp_core.cli", "plugins", "--json"))["plugins"]
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.distribution)
def test_it_uses_public_names_only(example: Example) -> None:
    assert private_imports(Wheels.source(example.distribution)) == []


def passed(report: str) -> int:
    """How many tests pytest's last line says passed."""
    words = report.strip().splitlines()[-1].replace(",", "").split()
    return int(words[words.index("passed") - 1])
