"""Write the pages of ``docs/`` that are made from tables: points, capabilities, backends, migration.

python tools/make_docs.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from interp_core.backend import BackendSpec, support_of
from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.host import default_host
from interp_core.points import GENERAL_POINTS, PointSupport
from interp_core.vocabularies import LIBRARIES, VOCABULARIES, NoName, Vocabulary
from interp_core.vocabularies.conditions import CONDITIONS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PARTS = Path(__file__).resolve().parent / "pages"
BACKENDS = ("eager", "vllm", "vllm-static", "vllm-generate")
MADE = "Made from the tables in `{package}` by `python tools/make_docs.py`; do not edit."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def points() -> str:
    """The general points."""
    lines = [
        "# Points",
        "",
        MADE.format(package="interp_core"),
        "",
        "An address is `name[.layer][.coordinate-N]`, such as `resid_post.10`, `z.3.head-4` or `embeddings`. In",
        "requests layers may be a range: `resid_post.0-11`, `resid_post.*`. `interp points MODEL` says what is served.",
        "How addresses are written is on [a page of its own](addresses.md); which backend serves which point on",
        "[another](backends.md).",
        "",
    ]
    rows = [
        (f"`{spec.name}`", spec.scope, " × ".join(spec.axes), spec.definition, "yes" if spec.writable else "no")
        for spec in GENERAL_POINTS.values()
    ]
    lines += table(("point", "scope", "last axes", "what it is", "may be written"), rows)
    return "\n".join(lines) + "\n"


def capabilities() -> str:
    """The table of capabilities, behind what is said about it by hand."""
    rows = [(f"`{row.name}`", row.what, row.why, row.instead) for row in CORE_CAPABILITIES.values()]
    head = ("capability", "what", "why it may be refused", "call instead")
    return with_intro("capabilities", "interp_core", table(head, rows))


def backends() -> str:
    """What each backend of this repository serves, from its own description."""
    specs = registered()
    rows = [(f"`{name}`", *(mark(support_of(spec, name)) for spec in specs)) for name in GENERAL_POINTS]
    lines = ["## Points", "", *table(("point", *(f"`{spec.name}`" for spec in specs)), rows)]
    lines += ["", "Why not:", ""]
    for spec in specs:
        lines += reasons(spec)
    rows = [
        (f"`{name}`", *("yes" if name in spec.capabilities else "" for spec in specs))
        for name in CORE_CAPABILITIES
        if any(name in spec.capabilities for spec in specs)
    ]
    lines += ["", "## Capabilities", "", *table(("capability", *(f"`{spec.name}`" for spec in specs)), rows), ""]
    for spec in specs:
        lines += [f"- `{spec.name}`, no `{name}`: {why}." for name, why in sorted(spec.lacks.items())]
    return with_intro("backends", "interp_eager` and `interp_vllm", lines)


def registered() -> list[BackendSpec]:
    """The backends of this repository, in the order of the page."""
    host = default_host()
    host.load()
    missing = [name for name in BACKENDS if name not in host.backends]
    if missing:
        raise SystemExit(f"not registered here, so their page cannot be made: {', '.join(missing)}")
    return [host.backends[name] for name in BACKENDS]


def mark(support: PointSupport) -> str:
    """One cell."""
    if not support.readable:
        return ""
    read = "read" if support.mode == "hook" else "rebuilt"
    return f"{read}, written" if support.writable else read


def reasons(spec: BackendSpec) -> list[str]:
    """Why a backend does not serve, or not write, points: one line per reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, point in GENERAL_POINTS.items():
        support = support_of(spec, name)
        if support.why and (not support.readable or (point.writable and not support.writable)):
            kind = "not written" if support.readable else "not read"
            found.setdefault((kind, support.why), []).append(f"`{name}`")
    if not spec.points:
        return [f"- `{spec.name}` serves no point: {spec.lacks.get('capture', '')}."]
    return [f"- `{spec.name}`, {kind}: {', '.join(names)}; {why}." for (kind, why), names in found.items()]


def migration() -> str:
    """Their names for our points, and what has none."""
    lines = ["## Points in four vocabularies", "", "Conditions and other spellings are in the sections below.", ""]
    columns = [(title, vocabulary) for library in LIBRARIES for title, vocabulary in [column(library)]]
    rows = [(f"`{point}`", *(cell(vocabulary, point) for _, vocabulary in columns)) for point in GENERAL_POINTS]
    lines += table(("here", *(title for title, _ in columns)), rows)
    for library in LIBRARIES:
        for vocabulary in VOCABULARIES[library]:
            lines += section(vocabulary)
    return with_intro("migration", "interp_core.vocabularies", lines)


def column(library: str) -> tuple[str, Vocabulary]:
    """The vocabulary that stands for a library in the overview: of several trees the first."""
    vocabulary = VOCABULARIES[library][0]
    return vocabulary.title, vocabulary


def where(keys: Iterable[str]) -> str:
    """Conditions in words."""
    return " and ".join(CONDITIONS[key].where for key in keys)


def cell(vocabulary: Vocabulary, point: str) -> str:
    """The names that a point goes by on one model or another; which, and other spellings, are said below."""
    rows = vocabulary.named(point)
    if not rows:
        return "none"
    shown = rows[:1] if not rows[0].when else [row for row in rows if row.when]
    return " or ".join(dict.fromkeys("`" + row.name.replace("{layer}", "3") + "`" for row in shown))


def section(vocabulary: Vocabulary) -> list[str]:
    """Everything about one vocabulary."""
    lines = ["", f"## {vocabulary.title}", ""]
    rows = [
        (f"`{row.name.replace('{layer}', '3')}`", f"`{row.point}`", where(row.when), row.note)
        for row in vocabulary.names
    ]
    lines += table(("name there", "point here", "where", "note"), rows)
    if vocabulary.others:
        lines += ["", "Names that are no point here:", ""]
        others = [(f"`{row.name.replace('{layer}', '3')}`", row.why, row.near) for row in vocabulary.others]
        lines += table(("name there", "why", "what is near"), others)
    if vocabulary.unnamed:
        lines += [
            "",
            "Points without a name there:",
            "",
            *table(("point here", "why", "what is near"), without(vocabulary)),
        ]
    return lines


def without(vocabulary: Vocabulary) -> list[tuple[str, str, str]]:
    """Rows of points that they have no name for."""

    def when(row: NoName) -> str:
        return f", where {where(row.when)}" if row.when else ""

    return [(f"`{row.point}`{when(row)}", row.why, row.near) for row in vocabulary.unnamed]


def with_intro(page: str, package: str, lines: Sequence[str]) -> str:
    """A page: what ``tools/pages/PAGE.md`` says by hand, then what is made."""
    intro = (PARTS / f"{page}.md").read_text(encoding="utf-8").rstrip()
    return "\n".join([intro, "", f"What follows is m{MADE[1:].format(package=package)}", "", *lines]) + "\n"


PAGES = {"points": points, "capabilities": capabilities, "backends": backends, "migration": migration}


def main() -> int:
    """Write the pages, or compare them."""
    stale = []
    for name, render in PAGES.items():
        text, target = render(), DOCS / f"{name}.md"
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != text:
            stale.append(target.name)
    if stale:
        print(f"stale: {', '.join(stale)}; run: python tools/make_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
