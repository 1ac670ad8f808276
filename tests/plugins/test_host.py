"""The host, with plugins given as objects: every failure contained, every conflict settled, no order."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pluggy
import pytest
from attrs import define, frozen

from interp_core._version import __version__
from interp_core.backend import BackendSpec
from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.errors import PluginConflict, PluginUnavailable
from interp_core.hookspecs import InterpHooks, hookimpl
from interp_core.host import PluginHost, PluginWarning, default_host
from interp_core.points import hook
from tests.plugins.fakes import (
    CONFLICTS,
    GOOD,
    architecture,
    backend,
    boom,
    host_of,
    loaded,
    plugin,
    point,
    record_of,
    row,
)


def leave() -> Any:
    raise SystemExit(3)


def nothing() -> list[Any]:
    return []


def one_by_one() -> Iterator[BackendSpec]:
    yield backend("bad")


async def later() -> Any:
    return []


def unmarked() -> types.ModuleType:
    module = plugin(capabilities=[row("shiny")])
    module.interp_backends = lambda: [backend("bad")]  # type: ignore[attr-defined]
    return module


class AsClass:
    @hookimpl
    def interp_backends(self) -> list[BackendSpec]:
        return [backend("bad")]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_unspeakable() -> Any:
    raise Unspeakable


class NoDir:
    def __dir__(self) -> list[str]:
        raise RuntimeError("look away")


@hookimpl(wrapper=True)
def wrapping() -> Any:
    return (yield)


def wrapper_plugin() -> types.ModuleType:
    module = types.ModuleType("made_up")
    module.interp_backends = wrapping  # type: ignore[attr-defined]
    return module


BROKEN: dict[str, tuple[Any, str, type[BaseException]]] = {
    "raising hook": (
        plugin(interp_backends=boom),
        "Its hook interp_backends raised OSError: the disk is on fire.",
        OSError,
    ),
    "hook that exits": (plugin(interp_backends=leave), "raised SystemExit: 3.", SystemExit),
    "error without text": (plugin(interp_backends=raise_unspeakable), "raised Unspeakable: (its text", Unspeakable),
    "misspelt hook": (
        plugin(interp_backend=lambda: [backend("bad")]),
        "unknown hook 'interp_backend'. Did you mean 'interp_backends'?",
        TypeError,
    ),
    "misspelt hook beside a right one": (
        plugin(backends=[backend("bad")], interp_capabilites=nothing),
        "Did you mean 'interp_capabilities'?",
        TypeError,
    ),
    "hook without the prefix": (plugin(backends_of_mine=nothing), "unknown hook 'backends_of_mine'", TypeError),
    "unmarked hook": (unmarked(), "interp_backends is not a function marked with @hookimpl", TypeError),
    "signature": (
        plugin(interp_backends=lambda config: []),
        "Registering it raised PluginValidationError",
        pluggy.PluginValidationError,
    ),
    "self at module level": (
        plugin(interp_backends=lambda self: []),
        "Registering it raised PluginValidationError",
        pluggy.PluginValidationError,
    ),
    "keyword-only argument": (plugin(interp_backends=lambda *, x: []), "raised TypeError", TypeError),
    "wrapper": (wrapper_plugin(), "is a wrapper", TypeError),
    "class, not instance": (AsClass, "It is the class AsClass; name an instance", TypeError),
    "None": (None, "this NoneType implements no hook", TypeError),
    "number": (7, "this int implements no hook", TypeError),
    "module without hooks": (types.ModuleType("empty"), "this module implements no hook", TypeError),
    "specs inherited, none implemented": (InterpHooks(), "this InterpHooks implements no hook", TypeError),
    "dir raises": (NoDir(), "Registering it raised RuntimeError: look away.", RuntimeError),
    "wrong record": (plugin(backends=[row("bad")]), "type Capability where a BackendSpec is due", TypeError),
    "one wrong record of two": (plugin(backends=[backend("bad"), "bad2"]), "type str where a BackendSpec", TypeError),
    "record, not a list": (plugin(backends=backend("bad")), "returned a value of type BackendSpec", TypeError),
    "text": (plugin(backends="bad"), "returned a value of type str", TypeError),
    "generator": (plugin(interp_backends=one_by_one), "type generator; return a list", TypeError),
    "asynchronous": (plugin(interp_backends=later), "is asynchronous", TypeError),
    "one name twice": (plugin(backends=[backend("bad"), backend("bad")]), "BackendSpec 'bad' twice", TypeError),
    "reserved backend": (plugin(backends=[backend("auto")]), "'auto' is the core's own", TypeError),
    "no name": (plugin(backends=[backend("")]), "name is ''", TypeError),
    "name with a space": (plugin(backends=[backend("b a d")]), "has a space", TypeError),
    "factory": (plugin(backends=[backend("bad", factory="engine")]), "not 'package.module:callable'", TypeError),
    "support": (plugin(backends=[backend("bad", points={"z": "hook"})]), "points is not a mapping", TypeError),
    "probe": (plugin(backends=[backend("bad", probe=True)]), "probe is not callable", TypeError),
    "architecture's support": (
        plugin(architectures=[architecture("bad", support={"eager": hook()})]),
        "support is not a mapping",
        TypeError,
    ),
    "name of a point": (plugin(architectures=[architecture("bad", point("a.b"))]), "cannot be the name", TypeError),
    "scope of a point": (
        plugin(architectures=[architecture("bad", point("ab", scope="block"))]),
        "has the scope 'block'",
        TypeError,
    ),
    "one point, two meanings": (
        plugin(architectures=[architecture("bad", point("ab")), architecture("bad2", point("ab", axes=("heads",)))]),
        "the point 'ab' has two meanings",
        TypeError,
    ),
    "row without why": (plugin(capabilities=[row("bad", why="")]), "why is ''", TypeError),
    "raises late": (
        plugin(backends=[backend("bad")], capabilities=[row("shiny")], interp_capabilities=boom),
        "Its hook interp_capabilities raised OSError",
        OSError,
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_contained_listed_and_named(kind: str) -> None:
    broken, phrase, error = BROKEN[kind]
    host = host_of(("bad", broken), GOOD, ("zebra", plugin(backends=[backend("zebra")])))
    with pytest.warns(PluginWarning) as seen:
        host.load()

    found = record_of(host, "bad")
    assert found.status == "failed"
    assert phrase in found.reason
    assert "\n" not in found.reason
    assert isinstance(found.error, error)
    # Rolled back, whole.
    assert set(host.backends) == {"good", "zebra"}
    assert dict(host.architectures) == {}
    assert dict(host.capabilities) == dict(CORE_CAPABILITIES)
    assert [record.status for record in host.records] == ["failed", "active", "active"]
    # One line, and it says everything.
    (line,) = [str(warning.message) for warning in seen]
    assert "\n" not in line
    assert all(part in line for part in ("'bad'", __version__, found.reason, "INTERP_DISABLE_PLUGINS=bad"))
    assert type(found.error).__name__ in line


def test_a_healthy_plugin_is_active_and_warns_of_nothing() -> None:
    # The control of the table above: the same path, with nothing wrong.
    host = host_of(
        (
            "fine",
            plugin(backends=[backend("b")], architectures=(architecture("a", point("p")),), capabilities=[row("c")]),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.load()
    found = record_of(host, "fine")
    assert (found.status, found.reason, found.error) == ("active", "", None)
    assert (found.backends, found.architectures, found.capabilities) == (("b",), ("a",), ("c",))
    assert host.backends["b"].owner == "fine"
    assert host.architectures["a"].owner == "fine"
    assert host.architectures["a"].points[0].owner == "fine"
    assert host.capabilities["c"].owner == "fine"


@pytest.mark.parametrize("empty", [None, [], ()])
def test_an_empty_answer_is_fine(empty: Any) -> None:
    module = types.ModuleType("made_up")
    module.interp_backends = hookimpl(lambda: empty)  # type: ignore[attr-defined]
    assert record_of(loaded(("quiet", module)), "quiet").status == "active"


def test_an_unknown_hook_marked_optional_is_for_another_core() -> None:
    module = plugin(backends=[backend("b")])
    module.interp_dreams = hookimpl(nothing, optionalhook=True)  # type: ignore[attr-defined]
    assert record_of(loaded(("p", module)), "p").status == "active"


def test_a_plugin_that_inherits_the_specs_is_read_for_what_it_overrides() -> None:
    class Mine(InterpHooks):
        @hookimpl
        def interp_backends(self) -> list[BackendSpec]:
            return [backend("mine")]

    class Forgot(InterpHooks):
        def interp_backends(self) -> list[BackendSpec]:
            return [backend("forgot")]

    host = loaded(("mine", Mine()), ("forgot", Forgot()))
    assert set(host.backends) == {"mine"}
    assert "not a function marked" in record_of(host, "forgot").reason


def test_ctrl_c_passes_and_leaves_the_host_fit_to_try_again() -> None:
    presses = [KeyboardInterrupt()]

    def interrupted() -> list[BackendSpec]:
        if presses:
            raise presses.pop()
        return [backend("b")]

    host = host_of(("p", plugin(interp_backends=interrupted)))
    with pytest.raises(KeyboardInterrupt):
        host.load()
    assert set(host.backends) == {"b"}


@frozen
class Twin:
    """Equal to every other, as attrs makes records."""

    @hookimpl
    def interp_backends(self) -> list[BackendSpec]:
        return []


@define
class Unhashable:
    name: str

    @hookimpl
    def interp_backends(self) -> list[BackendSpec]:
        return [backend(self.name)]


class Quarrelsome:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")

    __hash__ = None  # type: ignore[assignment]

    @hookimpl
    def interp_backends(self) -> list[BackendSpec]:
        return [backend("quarrel")]

    @property
    def heavy(self) -> Any:
        raise AssertionError("a property was evaluated")


def test_plugins_are_told_apart_by_identity() -> None:
    host = loaded(("a", Twin()), ("b", Twin()), ("c", Unhashable("c")), ("d", Quarrelsome()))
    assert [record.status for record in host.records] == ["active"] * 4
    assert set(host.backends) == {"c", "quarrel"}


def test_pluggy_alone_would_refuse_the_second_twin() -> None:
    # Negative control of the test above: the trap is real.
    manager = pluggy.PluginManager("interp")
    manager.register(Twin(), name="a")
    with pytest.raises(ValueError, match="already registered"):
        manager.register(Twin(), name="b")


def test_three_plugins_of_one_name_are_all_refused_and_never_called() -> None:
    calls: list[str] = []
    same = plugin(interp_backends=lambda: calls.append("called"))
    host = loaded(("same", same), ("same", same), ("same", same), GOOD)
    assert [record.status for record in host.records] == ["active", "conflict", "conflict", "conflict"]
    assert calls == []
    assert "uninstall all but one" in host.records[1].reason


def test_blocked_plugins_are_never_called() -> None:
    calls: list[str] = []
    quiet = plugin(interp_backends=lambda: calls.append("called"))
    host = host_of(("my_plugin", quiet), GOOD, INTERP_DISABLE_PLUGINS=" My.Plugin ,")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.load()
    assert record_of(host, "my_plugin").status == "blocked"
    assert "INTERP_DISABLE_PLUGINS" in record_of(host, "my_plugin").reason
    assert calls == []
    host_of(("my_plugin", quiet)).load()
    assert calls == ["called"]  # the control: it would have been


@pytest.mark.parametrize(
    ("allowed", "active"), [(None, {"good", "other"}), ("", set()), (" , ", set()), ("good", {"good"}), ("none", set())]
)
def test_the_allow_list(allowed: str | None, active: set[str]) -> None:
    environ = {} if allowed is None else {"INTERP_PLUGINS": allowed}
    host = loaded(GOOD, ("other", plugin(backends=[backend("other")])), **environ)
    assert set(host.backends) == active


def test_strict_raises_from_the_cause_each_time_and_still_lists() -> None:
    broken, _, error = BROKEN["raising hook"]
    host = host_of(("bad", broken), GOOD, INTERP_STRICT_PLUGINS="1")
    for _ in range(2):
        with pytest.raises(PluginUnavailable, match="'bad'") as caught:
            host.load()
        assert isinstance(caught.value.__cause__, error)
    with pytest.raises(PluginUnavailable):
        _ = host.backends
    assert [record.status for record in host.records] == ["failed", "active"]
    host_of(GOOD, INTERP_STRICT_PLUGINS="1").load()  # the control: nothing wrong, nothing raised
    assert set(loaded(("bad", broken), GOOD, INTERP_STRICT_PLUGINS="0").backends) == {"good"}


def test_strict_covers_conflicts_but_not_what_is_switched_off() -> None:
    first, second, _ = CONFLICTS["backend"]
    with pytest.raises(PluginUnavailable) as caught:
        host_of(("a", first), ("b", second), INTERP_STRICT_PLUGINS="1").load()
    assert isinstance(caught.value.__cause__, PluginConflict)
    host_of(("a", first), ("b", second), INTERP_STRICT_PLUGINS="1", INTERP_DISABLE_PLUGINS="b").load()


def test_warnings_made_errors_do_not_undo_loading() -> None:
    host = host_of(("bad", BROKEN["raising hook"][0]), GOOD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PluginWarning):
            host.load()
        host.load()
    assert set(host.backends) == {"good"}


def test_many_threads_load_once() -> None:
    calls: list[int] = []
    started = threading.Barrier(8)
    pause = threading.Event()

    def slow() -> list[BackendSpec]:
        calls.append(1)
        pause.wait(0.05)
        return [backend("b")]

    host = host_of(("p", plugin(interp_backends=slow)))
    seen: list[set[str]] = []

    def ask() -> None:
        started.wait()
        seen.append(set(host.backends))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert calls == [1]
    assert seen == [{"b"}] * 8


def test_a_plugin_that_asks_the_host_while_loading_gets_an_error() -> None:
    asked: list[PluginHost] = []
    host = host_of(("curious", plugin(interp_backends=lambda: list(asked[0].backends.values()))), GOOD)
    asked.append(host)
    with pytest.warns(PluginWarning, match="still being loaded"):
        host.load()
    assert set(host.backends) == {"good"}


def test_merged_tables_are_read_only_and_begin_with_the_core() -> None:
    host = loaded(("p", plugin(backends=[backend("b")], capabilities=[row("shiny")])))
    assert list(host.capabilities) == [*CORE_CAPABILITIES, "shiny"]
    for table in (host.backends, host.architectures, host.capabilities):
        with pytest.raises(TypeError):
            table["x"] = None  # type: ignore[index]
    assert "shiny" not in CORE_CAPABILITIES


def test_there_is_one_default_host() -> None:
    assert default_host() is default_host()
    assert PluginHost(discover=False) is not PluginHost(discover=False)
    assert PluginHost(discover=False) != PluginHost(discover=False)


def test_names_of_objects_given_without_one() -> None:
    host = PluginHost(discover=False, plugins=[Twin(), plugin(backends=[])], environ={})
    assert [record.name for record in host.records] == ["Twin", "made_up"]


HEAVY = ("torch", "transformers", "vllm", "numpy", "importlib_metadata", "packaging")


def imported(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_host_imports_nothing_heavy() -> None:
    assert imported("import interp_core.host") == set()
    assert imported("from interp_core.host import default_host; default_host()") == set()
    # The control: the same question does see one, once somebody looks for plugins.
    assert "importlib_metadata" in imported("from interp_core.host import list_plugins; list_plugins()")
