"""The kit itself: for each rule of its behaviour half a plugin that breaks it and is caught; right ones pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from wrong_plugins import ARCHITECTURES, BACKENDS, backend, gate_identity, host_of, with_gate

from interp_core import Cache, Capability, PluginHost
from interp_core.testing import ArchitectureConformance, BackendConformance, Check
from interp_core.testing.tiny import write_family
from interp_eager.plugin import CAPABILITIES

Suite = BackendConformance | ArchitectureConformance


def backend_suite(host_: PluginHost) -> BackendConformance:
    class Mine(BackendConformance):
        backend = "mine"
        host = host_

    return Mine()


def architecture_suite(host_: PluginHost, **attributes: Any) -> ArchitectureConformance:
    class Mine(ArchitectureConformance):
        architecture = "gated-llama"
        backends = ("mine",)
        host = host_

        def checkpoint(self, folder: Path) -> Path:
            return write_family("llama", folder)

    for name, value in attributes.items():
        setattr(Mine, name, value)
    return Mine()


def said_of(suite: Suite, test: str, folder: Path, family: str) -> str:
    """What a test of a suite says of its subject; empty if it passes."""
    subject = suite.subject_for(("mine", family), folder)
    try:
        getattr(suite, f"test_{test}")(subject)
    except pytest.fail.Exception as failure:
        return str(failure)
    finally:
        # Some cannot be shut down, which is what is wrong with them.
        subject.forget()
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the one checkpoint of these tests is."""
    return tmp_path_factory.mktemp("kit")


WRONG = [(test, made, words) for test, listed in BACKENDS.items() for made, words in listed]


@pytest.mark.parametrize(("test", "made", "words"), WRONG, ids=[f"{test}-{i}" for i, (test, _, _) in enumerate(WRONG)])
def test_a_wrong_backend_is_caught(test: str, made: Any, words: str, folder: Path) -> None:
    assert words in said_of(backend_suite(host_of(made())), test, folder, "llama")


@pytest.mark.parametrize("test", ARCHITECTURES)
def test_a_wrong_architecture_is_caught(test: str, folder: Path) -> None:
    made, words = ARCHITECTURES[test]
    assert words in said_of(architecture_suite(host_of(backend(), made())), test, folder, "gated-llama")


def test_every_rule_has_a_wrong_plugin() -> None:
    tests = {name.removeprefix("test_") for name in dir(ArchitectureConformance) if name.startswith("test_")}
    assert tests == {*BACKENDS, *ARCHITECTURES, "no_test_of_the_kit_is_replaced"}


def test_a_point_of_the_authors_own_is_proven_by_the_author(folder: Path) -> None:
    host = host_of(backend(), with_gate())
    silent = architecture_suite(host)
    said = said_of(silent, "every_point_is_proven", folder, "gated-llama")
    assert said.startswith("mlp_gate (layers: 0, 1) is declared but not proven")
    assert len(said.splitlines()) == 1
    excused = architecture_suite(host, unproven={"mlp_gate": "it is made up"})
    assert not said_of(excused, "every_point_is_proven", folder, "gated-llama")
    place = architecture_suite(host, unproven={"mlp_gate.0": "it is made up"})
    assert "mlp_gate (layers: 1) is declared" in said_of(place, "every_point_is_proven", folder, "gated-llama")
    proven = architecture_suite(host, identities=gate_identity)
    assert not said_of(proven, "every_point_is_proven", folder, "gated-llama")
    stale = architecture_suite(host, identities=gate_identity, unproven={"mlp_gate": "it was made up"})
    assert said_of(stale, "every_point_is_proven", folder, "gated-llama").endswith("it is proven: take it out")


@pytest.mark.parametrize("unproven", [{"mlp_gaet": "a reason"}, {"mlp_gate": " "}])
def test_an_excuse_names_a_point_and_a_reason(unproven: dict[str, str], folder: Path) -> None:
    suite = architecture_suite(host_of(backend(), with_gate()), unproven=unproven)
    with pytest.raises(AssertionError, match="unproven names no point of this model, or gives no reason"):
        said_of(suite, "every_point_is_proven", folder, "gated-llama")


def test_an_identity_without_a_control_proves_nothing(folder: Path) -> None:
    def lazy(suite: Any, cache: Cache) -> Iterable[Check]:
        for check in gate_identity(suite, cache):
            yield Check(
                identity=check.identity,
                layer=check.layer,
                proves=check.proves,
                error=check.error,
                control=None,
                tolerance=check.tolerance,
            )

    suite = architecture_suite(host_of(backend(), with_gate()), identities=lazy)
    assert "declared but not proven" in said_of(suite, "every_point_is_proven", folder, "gated-llama")


def test_a_capability_of_the_authors_own_is_used(folder: Path) -> None:
    row = Capability(name="replay", what="Replay a graph.", why="Nobody else does.", instead="run it again")
    host = host_of(backend(capabilities=CAPABILITIES | {"replay"}), row)
    used: list[Any] = []
    silent, using = backend_suite(host), backend_suite(host)
    type(using).uses = {"replay": used.append}
    said = said_of(silent, "declared_capabilities_work", folder, "llama")
    assert said == "the capability 'replay' is declared but not proven: give uses = {'replay': function}"
    assert not said_of(using, "declared_capabilities_work", folder, "llama")
    assert len(used) == 1


def test_a_test_that_is_replaced_is_noticed() -> None:
    class Mine(BackendConformance):
        backend = "mine"

        def test_shutdown(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(AssertionError, match=r"replaced: \['test_shutdown'\]"):
        Mine().test_no_test_of_the_kit_is_replaced()
    backend_suite(host_of(backend())).test_no_test_of_the_kit_is_replaced()


RIGHT = """
from interp_core.testing import ArchitectureConformance, BackendConformance
from interp_core.testing.tiny import write_family
from wrong_plugins import backend as described
from wrong_plugins import few_places, gate_identity, host_of, with_gate


class TestMyBackend(BackendConformance):
    backend = "mine"
    families = ("llama",)
    host = host_of(described())


class TestMyArchitecture(ArchitectureConformance):
    architecture = "gated-llama"
    backends = ("mine",)
    host = host_of(described(), with_gate())
    identities = gate_identity

    def checkpoint(self, folder):
        return write_family("llama", folder)


class TestThatGenerates(BackendConformance):
    backend = "mine"
    families = ("llama",)
    host = host_of(described(capabilities={"step_logits"}, hooks=False, points={}))


class TestWithDeclaredSets(BackendConformance):
    backend = "mine"
    families = ("gpt_neox",)
    host = host_of(described(static=few_places))


class TestWithItsOwnCheckpoint(BackendConformance):
    backend = "mine"
    host = host_of(described())

    def checkpoint(self, folder):
        return write_family("qwen3", folder)
"""


class Outcomes:
    """What became of each test of a run of pytest."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.passed: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid.rpartition("::")[2]] = report.longreprtext
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid.rpartition("::")[2])


def outcomes(folder: Path, text: str) -> Outcomes:
    """Run the tests of a file in this process, which has an engine imported already."""
    # A name of its own: modules of tests stay imported in this process.
    file, found = folder / f"test_author_of_{folder.name}.py", Outcomes()
    file.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    alone = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:terminal",
        "-W",
        "error::pytest.PytestWarning",
        "--capture=no",
        "--import-mode=importlib",
    ]
    pytest.main([*alone, "--rootdir", str(folder), "-c", str(folder / "pytest.ini"), str(file)], plugins=[found])
    return found


def test_right_plugins_pass_under_pytest(tmp_path: Path) -> None:
    found = outcomes(tmp_path, RIGHT)
    assert found.failed == {}
    tests = [name for name in dir(BackendConformance) if name.startswith("test_")]
    passed = Counter(name.partition("[")[2] for name in found.passed)
    assert passed["mine-gated-llama]"] == len(tests)
    assert passed["mine-checkpoint]"] == passed["mine-gpt_neox]"] == len(tests) - 1
    assert passed["mine-llama]"] > len(tests)
    assert passed[""] == 5  # The one test that needs no model.


def test_a_wrong_plugin_fails_under_pytest(tmp_path: Path) -> None:
    wrong = RIGHT.partition("class TestThatGenerates")[0].replace(
        "host_of(described())", 'host_of(described("ForgetsTheMultiplier"))'
    )
    found = outcomes(tmp_path, wrong.replace("    identities = gate_identity\n", ""))
    told = "'resid_pre + attn_out_post is resid_mid' at layer 0 fails"
    assert told in found.failed["test_every_point_is_proven[mine-llama]"]
    assert "mlp_gate (layers: 0, 1) is declared" in found.failed["test_every_point_is_proven[mine-gated-llama]"]
    assert len(found.passed) > 30
