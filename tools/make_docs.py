"""Write ``docs/points.md`` from the table of points and the table of capabilities.

python tools/make_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from interp_core.capabilities import CORE_CAPABILITIES
from interp_core.points import GENERAL_POINTS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "points.md"


def render() -> str:
    """The page."""
    lines = [
        "# Points and capabilities",
        "",
        "Made from the tables in `interp_core` by `python tools/make_docs.py`; do not edit.",
        "",
        "An address is `name[.layer][.coordinate-N]`, such as `resid_post.10`, `z.3.head-4` or `embeddings`. In",
        "requests layers may be a range: `resid_post.0-11`, `resid_post.*`. `interp points MODEL` says what is served.",
        "",
        "| point | scope | last axes | what it is | may be written |",
        "|---|---|---|---|---|",
    ]
    for spec in GENERAL_POINTS.values():
        writable = "yes" if spec.writable else "no"
        lines.append(f"| `{spec.name}` | {spec.scope} | {' × '.join(spec.axes)} | {spec.definition} | {writable} |")
    lines += ["", "## Capabilities", "", "| capability | what | where refused, call instead |", "|---|---|---|"]
    for row in CORE_CAPABILITIES.values():
        lines.append(f"| `{row.name}` | {row.what} | {row.instead} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    text = render()
    if "--check" in sys.argv:
        return 0 if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
