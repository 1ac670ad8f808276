"""Discovery, over folders of metadata written by hand: nothing is imported, nothing broken spreads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import importlib_metadata
import packaging.requirements  # noqa: F401 - imported now, as the tests narrow sys.path to one folder
import pytest

from interp_core._version import __version__
from interp_core.discovery import PluginEntry, PluginFilter, scan
from interp_core.errors import PluginConflict
from interp_core.host import PluginHost, PluginRecord, PluginWarning, list_plugins


def distribution(
    site: Path,
    name: str,
    version: str = "1.0",
    *,
    entries: str = "",
    requires: tuple[str, ...] = (),
    metadata: str | bytes | None = None,
) -> Path:
    """Write the metadata of one installed distribution; ``entries`` are lines of our group."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    if metadata is None:
        lines = [f"Requires-Dist: {line}" for line in requires]
        metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""])
    (info / "METADATA").write_bytes(metadata.encode() if isinstance(metadata, str) else metadata)
    if entries:
        (info / "entry_points.txt").write_text(f"[interp.plugins]\n{entries}\n")
    return info


class Site:
    """Folders that stand for everything that is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
        self.monkeypatch = monkeypatch
        self.folders = folders

    def scan(self, core_version: str = __version__) -> tuple[PluginEntry, ...]:
        with self.monkeypatch.context() as patched:
            patched.setattr(sys, "path", [str(folder) for folder in self.folders])
            importlib_metadata.MetadataPathFinder.invalidate_caches()
            return scan(core_version)

    def list(self, **environ: str) -> tuple[PluginRecord, ...]:
        with self.monkeypatch.context() as patched:
            patched.setattr(sys, "path", [str(folder) for folder in self.folders])
            importlib_metadata.MetadataPathFinder.invalidate_caches()
            return list_plugins(environ)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch, tmp_path)


def test_entries_are_sorted_and_say_where_they_come_from(tmp_path: Path, site: Site) -> None:
    distribution(tmp_path, "dist-b", "2.0", entries="zeta = zeta.plugin\nalpha = alpha.plugin:obj [extra]")
    distribution(tmp_path, "dist-a", "0.3", entries="mid = mid.plugin", requires=("interp-core>=0.1,<0.2", "attrs"))
    distribution(tmp_path, "stranger", "9")
    assert site.scan() == (
        PluginEntry("alpha", "alpha.plugin:obj [extra]", "dist-b", "2.0"),
        PluginEntry("mid", "mid.plugin", "dist-a", "0.3", "<0.2,>=0.1"),
        PluginEntry("zeta", "zeta.plugin", "dist-b", "2.0"),
    )


def test_metadata_of_strangers_is_not_opened(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "ours", entries="ours = ours.plugin")
    stranger = distribution(tmp_path, "stranger")
    (stranger / "entry_points.txt").write_text("[console_scripts]\nstranger = interp.plugins:main\n")
    opened: list[str] = []
    original = Path.read_text

    def spy(self: Path, *args: object, **kwargs: object) -> str:
        opened.append(f"{self.parent.name.partition('-')[0]}/{self.name}")
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", spy)
    assert [entry.name for entry in site.scan()] == ["ours"]
    assert "stranger/METADATA" not in opened
    assert "ours/METADATA" in opened  # the control: the spy does see METADATA


def test_duplicates_of_a_name_are_all_kept(tmp_path: Path, site: Site) -> None:
    for name in ("two", "one"):
        distribution(tmp_path, name, entries="dup = dup.plugin")
    assert [(entry.name, entry.distribution) for entry in site.scan()] == [("dup", "one"), ("dup", "two")]


def test_an_older_copy_later_on_the_path_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    distribution(new, "Some-Plugin", "2.0", entries="some = some.plugin")
    distribution(old, "some.plugin", "1.0", entries="some = some.plugin\nother = other.plugin")
    assert [(e.name, e.version) for e in Site(monkeypatch, new, old).scan()] == [("some", "2.0")]
    assert [e.version for e in Site(monkeypatch, old, new).scan()] == ["1.0", "1.0"]  # the control


def test_a_copy_without_plugins_hides_an_older_one_with_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    distribution(new, "former", "2.0")
    distribution(old, "former", "1.0", entries="former = former.plugin")
    assert Site(monkeypatch, new, old).scan() == ()
    assert len(Site(monkeypatch, old, new).scan()) == 1  # the control


@pytest.mark.parametrize(
    ("requires", "core", "specifier", "fits"),
    [
        ((), "0.1.0", "", True),
        (("interp-core",), "0.1.0", "", True),
        (("interp_core >= 0.1, < 0.2",), "0.1.0", "<0.2,>=0.1", True),
        (("interp-core>=0.1,<0.2",), "0.2.0", "<0.2,>=0.1", False),
        (("interp-core>=99",), "0.1.0", ">=99", False),
        (("Interp.Core~=0.1",), "0.9", "~=0.1", True),
        (("interp-core>=0.1",), "0.2.0rc1", ">=0.1", True),
        (("interp-core>=0.1",), "0.1.0.dev1", ">=0.1", False),
        (("interp-core>=0.1", "interp-core!=0.1.0"), "0.1.0", "!=0.1.0,>=0.1", False),
        (("interp-core>=99 ; extra == 'future'",), "0.1.0", "", True),
        (("interp-core[testing]>=99 ; python_version < '3'", "interp-core>=0.1"), "0.1.0", ">=0.1", True),
        (("interp-core-extras>=99", "numpy>=99"), "0.1.0", "", True),
        (("interp-core @ https://example.org/core.whl",), "0.1.0", "", True),
    ],
)
def test_the_required_core(
    tmp_path: Path, site: Site, requires: tuple[str, ...], core: str, specifier: str, fits: bool
) -> None:
    distribution(tmp_path, "p", entries="p = p.plugin", requires=requires)
    (entry,) = site.scan(core)
    assert entry.requires_core == specifier
    assert (entry.problem is None) == fits
    if not fits:
        assert entry.problem == f"It requires interp-core{specifier}, and {core} is installed."


def test_an_unreadable_requirement_on_the_core_is_a_problem_and_on_others_is_not(tmp_path: Path, site: Site) -> None:
    distribution(tmp_path, "ours", entries="ours = p", requires=("interp-core >>> 3",))
    distribution(tmp_path, "theirs", entries="theirs = p", requires=("what is this", "interp-core>=0.1"))
    ours, theirs = site.scan()
    assert "interp-core >>> 3" in str(ours.problem)
    assert (theirs.problem, theirs.requires_core) == (None, ">=0.1")


@pytest.mark.parametrize("metadata", ["", b"\xff\xfe\x00 not text", "Metadata-Version: 2.1\n\nno name\n"])
def test_a_plugin_with_broken_metadata_is_listed_by_the_name_of_its_folder(
    tmp_path: Path, site: Site, metadata: str | bytes
) -> None:
    distribution(tmp_path, "broken", "3.1", entries="broken = broken.plugin", metadata=metadata)
    distribution(tmp_path, "fine", entries="fine = fine.plugin")
    broken, fine = site.list()
    assert (broken.name, broken.distribution, broken.version) == ("broken", "broken", "3.1")
    assert broken.status == "incompatible"
    assert "METADATA" in broken.reason
    assert fine.status == "enabled"


def test_missing_metadata_is_a_problem_too(tmp_path: Path, site: Site) -> None:
    (distribution(tmp_path, "gone", entries="gone = p") / "METADATA").unlink()
    (record,) = site.list()
    assert (record.status, record.distribution) == ("incompatible", "gone")


def test_malformed_entry_points_are_contained(tmp_path: Path, site: Site) -> None:
    distribution(tmp_path, "ours", entries="no equals sign here")
    stranger = distribution(tmp_path, "stranger")
    (stranger / "entry_points.txt").write_text("[console_scripts]\nneither here\n")
    (distribution(tmp_path, "binary") / "entry_points.txt").write_bytes(b"\xff\xfe[interp.plugins]")
    distribution(tmp_path, "fine", entries="fine = fine.plugin")
    fine, ours = site.list()
    assert (fine.status, ours.status) == ("enabled", "incompatible")
    assert (ours.name, ours.distribution) == ("ours", "ours")
    assert "entry_points.txt cannot be read" in ours.reason


def test_the_stock_reader_fails_on_a_strangers_malformed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Negative control of the test above: the trap is real.
    stranger = distribution(tmp_path, "stranger")
    (stranger / "entry_points.txt").write_text("[console_scripts]\nneither here\n")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [str(tmp_path)])
        importlib_metadata.MetadataPathFinder.invalidate_caches()
        with pytest.raises(TypeError):
            importlib_metadata.entry_points(group="interp.plugins")


def statuses(records: tuple[PluginRecord, ...]) -> dict[str, str]:
    return {record.distribution: record.status for record in records}


@pytest.fixture
def three(tmp_path: Path, site: Site) -> Site:
    """Two distributions that share an entry point's name, between two others."""
    distribution(tmp_path, "dist-a", entries="alpha = a.plugin")
    distribution(tmp_path, "dist-one", "1.1", entries="dup = one.plugin")
    distribution(tmp_path, "dist-two", "2.2", entries="dup = two.plugin")
    distribution(tmp_path, "dist-z", entries="zeta = z.plugin")
    return site


def test_a_duplicated_name_is_a_conflict_of_both_and_of_nobody_else(three: Site) -> None:
    records = three.list()
    assert statuses(records) == {
        "dist-a": "enabled",
        "dist-one": "conflict",
        "dist-two": "conflict",
        "dist-z": "enabled",
    }
    for record in records[1:3]:
        assert "dist-one 1.1 and dist-two 2.2" in record.reason
        assert "INTERP_DISABLE_PLUGINS=dist-one or INTERP_DISABLE_PLUGINS=dist-two" in record.reason
        assert isinstance(record.error, PluginConflict)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"INTERP_DISABLE_PLUGINS": "dist-one"}, "enabled blocked enabled enabled"),
        ({"INTERP_DISABLE_PLUGINS": "Dist_Two"}, "enabled enabled blocked enabled"),
        ({"INTERP_DISABLE_PLUGINS": "dup"}, "enabled blocked blocked enabled"),
        ({"INTERP_DISABLE_PLUGINS": " alpha , ,DIST.Z "}, "blocked conflict conflict blocked"),
        ({"INTERP_DISABLE_PLUGINS": ""}, "enabled conflict conflict enabled"),
        ({"INTERP_DISABLE_PLUGINS": "dist"}, "enabled conflict conflict enabled"),
        ({"INTERP_PLUGINS": ""}, "blocked blocked blocked blocked"),
        ({"INTERP_PLUGINS": "zeta,dist-one"}, "blocked enabled blocked enabled"),
        ({"INTERP_PLUGINS": "dup,zeta", "INTERP_DISABLE_PLUGINS": "dist-two,zeta"}, "blocked enabled blocked blocked"),
        ({}, "enabled conflict conflict enabled"),
    ],
)
def test_the_two_variables(three: Site, environ: Mapping[str, str], expected: str) -> None:
    assert [record.status for record in three.list(**environ)] == expected.split()


def test_a_plugin_that_this_core_cannot_use_holds_no_name_against_others(tmp_path: Path, site: Site) -> None:
    distribution(tmp_path, "good", entries="dup = good.plugin", requires=("interp-core>=0.1",))
    distribution(tmp_path, "next", entries="dup = next.plugin", requires=("interp-core>=99",))
    assert statuses(site.list()) == {"good": "enabled", "next": "incompatible"}


def test_blocking_comes_before_all_else(tmp_path: Path, site: Site) -> None:
    distribution(tmp_path, "next", entries="next = next.plugin", requires=("interp-core>=99",))
    assert statuses(site.list(INTERP_DISABLE_PLUGINS="next")) == {"next": "blocked"}


def test_the_off_switch_never_hits_another_plugin(tmp_path: Path, site: Site) -> None:
    # The name of one distribution is the entry point of another plugin.
    distribution(tmp_path, "dup", entries="dup = a.plugin")
    distribution(tmp_path, "other", entries="dup = b.plugin\nthird = c.plugin")
    reason = next(record.reason for record in site.list() if record.status == "conflict")
    assert "INTERP_DISABLE_PLUGINS=dup" not in reason
    assert "INTERP_DISABLE_PLUGINS=other" not in reason  # it would switch off 'third' as well
    assert "uninstall all but one" in reason


def test_listing_imports_nothing(tmp_path: Path, site: Site) -> None:
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')\n")
    distribution(tmp_path, "explosive", entries="explosive = explosive")
    assert statuses(site.list()) == {"explosive": "enabled"}
    assert "explosive" not in sys.modules


def test_filters_are_read_from_the_process_when_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERP_PLUGINS", "")
    assert {record.status for record in list_plugins()} <= {"blocked"}
    assert PluginFilter.from_environ({}) == PluginFilter(None, frozenset())


def test_an_unknown_name_in_either_variable_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "zz-turbo", entries="zz_turbo = zz_turbo_plugin")
    (tmp_path / "zz_turbo_plugin.py").write_text(
        "from interp_core.hookspecs import hookimpl\n\n\n@hookimpl\ndef interp_backends():\n    return []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    host = PluginHost(environ={"INTERP_PLUGINS": "zz-turbo,zz-trubo", "INTERP_DISABLE_PLUGINS": "zz_tubro"})
    with pytest.warns(PluginWarning) as seen:
        host.load()
    lines = [str(warning.message) for warning in seen]
    assert lines == [
        "INTERP_PLUGINS names 'zz-trubo', which no installed plugin is called. Did you mean 'zz-turbo'?",
        "INTERP_DISABLE_PLUGINS names 'zz-tubro', which no installed plugin is called. Did you mean 'zz-turbo'?",
    ]
    assert [record.name for record in host.records if record.status == "active"] == ["zz_turbo"]
