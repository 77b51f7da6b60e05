"""All comparisons by one command: runs them and rewrites the table in benchmarks/RESULTS.md.

    python -m benchmarks                             everything; about an hour on two cores
    python -m benchmarks --only steps,memory --rounds 3
    python -m benchmarks --only steps --print        shows the rows and writes nothing

A part that isn't run keeps the lines it has. Other processes on the machine make all figures worse, and not alike.
Lightning and Accelerate come with `pip install -e '.[bench]'`; where they are missing, the table says so.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import some_of
from benchmarks.contest import Asked
from benchmarks.record import RESULTS, Part, provenance, with_parts

PARTS = (
    "steps",
    "guards",
    "whole_run",
    "two_processes",
    "mnist_speed",
    "mnist_fast",
    "gpt",
    "strategies",
    "start_up",
    "sweeps",
    "search",
    "saving",
    "memory",
    "scale",
    "on_gpu",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a contestant failed."""
    asked = _arguments(sys.argv[1:] if argv is None else argv)
    # An exception instead of the signal's default, so that contestants are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    about = Asked(asked.rounds, asked.data_root.resolve())
    has_failed = False
    for name in asked.only:
        print(name, file=sys.stderr, flush=True)
        # Some of these modules import torch, so each only when it is its turn.
        module = importlib.import_module(f"benchmarks.{name}")
        rounds = about.rounds_or(module.ROUNDS)
        part = Part(name, tuple(module.rows(about)), provenance(name, rounds=rounds))
        for row in part.rows:
            print(row, flush=True)
            if "failed" in (row.ours, row.theirs):
                has_failed = True
        if not asked.print:
            results = with_parts(RESULTS.read_text(), [part], order=PARTS)
            RESULTS.write_text(results)
    return 1 if has_failed else 0


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    data_root = Path(os.environ.get("FRAMEWORK_TEST_DATA") or "data")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=some_of(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=_positive, default=None, help="of every part; default: each part's own")
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    parser.add_argument("--data-root", type=Path, default=data_root)
    return parser.parse_args(given)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1 is needed")
    return number


if __name__ == "__main__":
    sys.exit(main())
