"""``docs/coverage.md``: written from outcomes, and read back, so that single rows can be renewed and compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from interp_core.points import GENERAL_POINTS
from zoo.outcome import KINDS, Outcome

__all__ = ["current", "parse", "render"]

_INTRO: Final = """\
# Coverage

Made by `make conformance`; do not edit. Every architecture that transformers has for causal language modelling, and
every image or audio wrapper of one (`mm:`), as a tiny random model of a few layers in float32 on the `eager` backend:
its norm gains, biases and multipliers are set away from 1 and 0, so that an identity that forgets one fails. `proven`
means that on this model every point which is served, on every layer, is held by an identity whose negative control
fails; that writes of zero change no bit and large ones change the logits; and that every other point refuses with a
reason before a weight is loaded. `make conformance ARGS="NAME"` runs one again and shows what fails.
"""

_LEGEND: Final = (
    "`P` proven, `-` the trunk or layer has no such point, `x` it has, and the backend does not serve it, `?` served "
    "and not proven, `F` failed. One letter holds for all layers; else there is one per layer."
)

_REASONS_HEAD: Final = "## Reasons"
_ABSENT_HEAD: Final = "## Why points are not there"
_WHOLE_HEAD: Final = "## Architectures without a row"
_ROW: Final = re.compile(r"\| `(?P<name>[^`]+)` \| (?P<kind>[a-z ]+) \| (?P<marks>.*) \|")
_REASON: Final = re.compile(r"(?P<number>\d+)\. (?P<text>.*)")
_LINE: Final = re.compile(r"- `(?P<name>[^`]+)`: (?P<rest>.*)\.")


def render(outcomes: Iterable[Outcome]) -> str:
    """The page."""
    rows = sorted(outcomes, key=lambda outcome: outcome.name)
    numbers = _numbers(rows)
    lines = [
        _INTRO,
        *_counts(rows),
        "",
        "## Architecture × point",
        "",
        _LEGEND,
        "",
        *_table(rows, tuple(GENERAL_POINTS)),
    ]
    own = tuple(dict.fromkeys(point for row in rows for point in row.marks if point not in GENERAL_POINTS))
    if own:
        lines += ["", "## Points of trunks with several residual streams", ""]
        lines += _table([row for row in rows if set(own) & set(row.marks)], own)
    lines += ["", _REASONS_HEAD, "", *(f"{number}. {text}" for text, number in numbers.items())]
    lines += ["", _ABSENT_HEAD, "", "Numbers are those of the reasons; numbers in brackets are layers.", ""]
    lines += [_absent(row, numbers) for row in rows if row.marks and row.reasons]
    lines += ["", _WHOLE_HEAD, "", *(_whole(row) for row in rows if not row.marks)]
    return "\n".join(lines) + "\n"


def parse(page: str) -> dict[str, Outcome]:
    """Outcomes by name, from a page that :func:`render` wrote; their problems are not on it."""
    kinds: dict[str, str] = {}
    marks: dict[str, dict[str, str]] = {}
    reasons: dict[str, dict[str, list[str]]] = {}
    texts: dict[str, str] = {}
    columns: list[str] = []
    for line in page.splitlines():
        if line.startswith("| architecture |"):
            columns = re.findall(r"`([^`]+)`", line)
        elif found := _ROW.fullmatch(line):
            name = found["name"]
            kinds[name] = found["kind"]
            cells = zip(columns, found["marks"].split(" | "), strict=True)
            marks.setdefault(name, {}).update({point: cell for point, cell in cells if cell.strip()})
        elif found := _REASON.fullmatch(line):
            texts[found["number"]] = found["text"]
        elif found := _LINE.fullmatch(line):
            _parse_line(found["name"], found["rest"], kinds, reasons, texts)
    return {
        name: Outcome(name=name, kind=kind, marks=marks.get(name, {}), reasons=reasons.get(name, {}))
        for name, kind in kinds.items()
    }


def current(page: str, fresh: Iterable[Outcome]) -> list[str]:
    """Names whose outcome is another than the page says."""
    said = parse(page)
    return [outcome.name for outcome in fresh if said.get(outcome.name) != outcome.bare()]


def _parse_line(
    name: str, rest: str, kinds: dict[str, str], reasons: dict[str, dict[str, list[str]]], texts: Mapping[str, str]
) -> None:
    if name in kinds:
        found = re.findall(r"\[(\d+)\] ([^;]+)", rest)
        reasons[name] = {texts[number]: points.split(", ") for number, points in found}
        return
    kind, _, reason = rest.partition(": ")
    kinds[name] = kind
    reasons[name] = {reason: ["every point"]} if reason else {}


def _numbers(rows: Sequence[Outcome]) -> dict[str, int]:
    """Reasons, the most frequent first."""
    uses = Counter(reason for row in rows if row.marks for reason in row.reasons)
    return {reason: i for i, (reason, _) in enumerate(sorted(uses.items(), key=lambda item: (-item[1], item[0])), 1)}


def _counts(rows: Sequence[Outcome]) -> list[str]:
    counts = Counter(row.kind for row in rows)
    lines = ["| architectures | |", "|---|---|"]
    lines += [f"| {what} | {counts[kind]} |" for kind, what in KINDS.items() if counts[kind]]
    blocks = sum(row.whole for row in rows)
    at = next((i for i, line in enumerate(lines) if line.startswith("| proven")), len(lines) - 1)
    lines.insert(at + 1, f"| of these, with the residual of every block | {blocks} |")
    return [*lines, f"| all | {len(rows)} |"]


def _table(rows: Sequence[Outcome], points: Sequence[str]) -> list[str]:
    lines = [f"| architecture | | {' | '.join(f'`{point}`' for point in points)} |", "|---|---|" + "---|" * len(points)]
    for row in rows:
        if row.marks:
            cells = [row.marks.get(point, "") for point in points]
            lines.append(f"| `{row.name}` | {row.kind} | {' | '.join(cells)} |")
    return lines


def _absent(row: Outcome, numbers: Mapping[str, int]) -> str:
    ordered = sorted((numbers[reason], points) for reason, points in row.reasons.items())
    return f"- `{row.name}`: " + "; ".join(f"[{number}] {', '.join(points)}" for number, points in ordered) + "."


def _whole(row: Outcome) -> str:
    reason = "; ".join(row.reasons)
    return f"- `{row.name}`: {row.kind}" + (f": {reason}" if reason else "") + "."
