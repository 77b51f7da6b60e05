"""The first difference of two runs with the `Recorder`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ORDER = ("epoch", "indices", "inputs", "gradients", "weights", "buffers", "optimizer", "generators")
"""What a row of the record holds; each part is computed from those before it."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if there is no file. A line that a kill cut is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Difference(NamedTuple):
    """The first difference of two records. rank: None if they are of different numbers of ranks."""

    rank: int | None
    step: int
    what: str
    one: Any
    other: Any

    def __str__(self) -> str:
        where = "" if self.rank is None else f", rank {self.rank}"
        return f"step {self.step}{where}: {self.what} differs: {_shortened(self.one)} and {_shortened(self.other)}"


def compare(one: Path, other: Path) -> Difference | None:
    """Return the first difference between the records of two run directories; None if they agree.

    Raises FileNotFoundError if a run has no record.
    """
    ours = _records(one)
    theirs = _records(other)
    if ours.keys() != theirs.keys():
        return Difference(None, 0, "the number of ranks", len(ours), len(theirs))
    steps: set[int] = set()
    for rank_rows in (*ours.values(), *theirs.values()):
        steps.update(rank_rows)
    for step in sorted(steps):
        rows = [(rank, ours[rank].get(step), theirs[rank].get(step)) for rank in sorted(ours)]
        for rank, left, right in rows:
            if (left is None) != (right is None):
                return Difference(rank, step, "that there is such a step", left is not None, right is not None)
        for part, (rank, left, right) in itertools.product(ORDER, rows):
            if left is not None and right is not None and left[part] != right[part]:
                return Difference(rank, step, *_first_unequal(part, left[part], right[part]))
    return None


def _records(run: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """Return rank → step → row."""
    files = sorted((run / "record").glob("rank_*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run} has no record. Run it with the callback tests.helpers.recorder.Recorder.")
    records = {}
    for file in files:
        rank = int(file.stem.removeprefix("rank_"))
        records[rank] = {row["step"]: row for row in read_rows(file)}
    return records


def _first_unequal(part: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    if not isinstance(one, Mapping):
        return part, one, other
    name = next(name for name in {**one, **other} if one.get(name) != other.get(name))
    return f"{part} {name}", one.get(name), other.get(name)


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
