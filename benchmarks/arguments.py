"""What the commands of several benchmarks read alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def some_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """For argparse: names with commas between them, all of which must be `allowed`."""
    known = list(allowed)

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return names

    return read
