"""Prove every point on every architecture of the installed transformers, each as a tiny random model.

    make conformance                                    # all, two processes; writes docs/coverage.md
    make conformance ARGS=--check                       # all; compares with the page instead
    make conformance ARGS="llama gemma2"
    python tools/conformance.py llama gemma2 mm:llava   # only these, with the details of what fails
    python tools/conformance.py --write llama           # one row of the page anew
    python tools/conformance.py --list                  # the names

Run it on single families while adding facts: for every failure it prints the identity, the layer, the error and
the control. Letters, one per layer: P proven, F failed, ? served without proof, - not there, x not served.
The exit status is 1 where anything failed or is served without proof, and, for all, where fewer than 150
architectures are proven with the residual of every block.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from zoo.outcome import Outcome

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"
_LEAST_PROVEN = 150
_BAD = ("failed", "not proven", "error")


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status."""
    options = _parser().parse_args(arguments)
    from zoo.build import names

    known = names()
    if options.list:
        print("\n".join(sorted(known)))
        return 0
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        print(f"no such architecture: {', '.join(unknown)} (--list prints the names)", file=sys.stderr)
        return 2
    outcomes = sorted(_run(options.names or sorted(known), options.jobs), key=lambda outcome: outcome.name)
    for outcome in outcomes:
        if options.names or outcome.problems or outcome.doubts:
            print(_details(outcome), end="\n\n")
    counts = Counter(outcome.kind for outcome in outcomes)
    print(", ".join(f"{kind}: {counts[kind]}" for kind in sorted(counts)))
    bad = any(outcome.kind in _BAD or outcome.problems for outcome in outcomes)
    bad |= not options.names and sum(outcome.whole for outcome in outcomes) < _LEAST_PROVEN
    if options.write or options.check or not options.names:
        bad |= _page(outcomes, whole=not options.names, check=options.check)
    return int(bad)


def _page(outcomes: Sequence[Outcome], *, whole: bool, check: bool) -> bool:
    """Write the page, or compare with it; whether it is stale."""
    from zoo.page import current, parse, render

    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if check:
        stale = current(text, outcomes)
        stale += sorted(set(parse(text)) - {outcome.name for outcome in outcomes}) if whole else []
        if stale:
            print(f"{PAGE.name} is stale for: {', '.join(stale)}; run: make conformance", file=sys.stderr)
        return bool(stale)
    rows = ({} if whole else parse(text)) | {outcome.name: outcome for outcome in outcomes}
    PAGE.write_text(render(rows.values()), encoding="utf-8")
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Prove every point on every architecture of transformers.")
    parser.add_argument("names", nargs="*", help="architectures; none for all")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--write", action="store_true", help="with names: write their rows of the page")
    parser.add_argument("--list", action="store_true", help="print the names of all architectures")
    return parser


def _run(names: Sequence[str], jobs: int) -> Iterator[Outcome]:
    if len(names) == 1 or jobs == 1:
        _quiet()
        for name in tqdm(names, disable=len(names) == 1):
            yield _one(name)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(names)), context, initializer=_quiet) as pool:
        futures = [pool.submit(_one, name) for name in names]
        for future in tqdm(as_completed(futures), total=len(futures)):
            yield future.result()


def _quiet() -> None:
    """One thread per process, and no word from the libraries."""
    import logging
    import os
    import warnings

    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()


def _one(name: str) -> Outcome:
    from zoo.prove import prove

    return prove(name)


def _details(outcome: Outcome) -> str:
    lines = [f"{outcome.name}: {outcome.kind}"]
    groups: dict[str, list[str]] = {}
    for point, marks in outcome.marks.items():
        groups.setdefault(marks, []).append(point)
    lines += [f"  {marks:8} {' '.join(points)}" for marks, points in groups.items()]
    lines += [f"  why: {', '.join(points)}: {reason}" for reason, points in outcome.reasons.items()]
    lines += ["  ! " + problem.rstrip().replace("\n", "\n    ") for problem in outcome.problems]
    lines += ["  ? " + doubt for doubt in outcome.doubts]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
