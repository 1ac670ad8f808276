"""Two owners of one name: both refused, whatever the order, and the way out works."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.errors import PluginConflict
from interp_core.points import PointSpec
from tests.plugins.fakes import (
    CONFLICTS,
    GOOD,
    architecture,
    backend,
    boom,
    loaded,
    plugin,
    point,
    record_of,
    row,
)


@pytest.mark.parametrize("kind", CONFLICTS)
def test_two_owners_of_one_name_are_both_refused_whatever_the_order(kind: str) -> None:
    first, second, phrase = CONFLICTS[kind]
    plugins = [("alpha", first), ("beta", second), GOOD]
    hosts = [loaded(*order) for order in itertools.permutations(plugins)]
    for host in hosts:
        assert host.records == hosts[0].records
        assert set(host.backends) == {"good"}
        assert dict(host.architectures) == {}
        assert dict(host.capabilities) == dict(CORE_CAPABILITIES)
        for name in ("alpha", "beta"):
            found = record_of(host, name)
            assert found.status == "conflict"
            assert phrase in found.reason
            assert "alpha and beta" in found.reason
            assert "INTERP_DISABLE_PLUGINS=alpha or INTERP_DISABLE_PLUGINS=beta" in found.reason
            assert isinstance(found.error, PluginConflict)


@pytest.mark.parametrize("kind", CONFLICTS)
@pytest.mark.parametrize("off", ["alpha", "beta"])
def test_the_way_out_of_a_conflict_works(kind: str, off: str) -> None:
    first, second, _ = CONFLICTS[kind]
    host = loaded(("alpha", first), ("beta", second), INTERP_DISABLE_PLUGINS=off)
    statuses = {record.name: record.status for record in host.records}
    assert statuses == {"alpha": "active", "beta": "active"} | {off: "blocked"}


def test_points_that_agree_are_no_conflict() -> None:
    first = plugin(architectures=[architecture("one", point("x"))])
    second = plugin(architectures=[architecture("two", evolve_words(point("x")))])
    assert [record.status for record in loaded(("a", first), ("b", second)).records] == ["active", "active"]


def evolve_words(spec: PointSpec) -> PointSpec:
    return PointSpec(name=spec.name, scope=spec.scope, axes=spec.axes, definition="The same tensor in other words.")


def test_a_chain_of_conflicts_takes_all_of_it() -> None:
    # If conflicts were settled one after the other, who is left would depend on the order.
    plugins = [
        ("a", plugin(backends=[backend("x")])),
        ("b", plugin(backends=[backend("x"), backend("y")])),
        ("c", plugin(backends=[backend("y")])),
    ]
    for order in itertools.permutations(plugins):
        host = loaded(*order)
        assert [record.status for record in host.records] == ["conflict"] * 3
        both = record_of(host, "b").reason
        assert "'x' is claimed by a and b" in both
        assert "'y' is claimed by b and c" in both
        healed = loaded(*order, INTERP_DISABLE_PLUGINS="b")
        assert set(healed.backends) == {"x", "y"}


def test_a_failed_plugin_holds_no_name_against_others() -> None:
    late = plugin(backends=[backend("x")], interp_capabilities=boom)
    host = loaded(("bad", late), ("fine", plugin(backends=[backend("x")])))
    assert record_of(host, "fine").status == "active"
    assert host.backends["x"].owner == "fine"


@pytest.mark.parametrize(
    ("taken", "phrase"),
    [
        (plugin(capabilities=[row("capture")]), "capability 'capture' belongs to interp-core"),
        (plugin(architectures=[architecture("a", point("resid_post"))]), "general point 'resid_post' belongs to"),
    ],
)
def test_what_is_the_cores_cannot_be_taken(taken: Any, phrase: str) -> None:
    host = loaded(("thief", taken), GOOD)
    found = record_of(host, "thief")
    assert found.status == "conflict"
    assert phrase in found.reason
    assert "INTERP_DISABLE_PLUGINS=thief" in found.reason
    assert host.capabilities["capture"] is CORE_CAPABILITIES["capture"]
    assert set(host.backends) == {"good"}
