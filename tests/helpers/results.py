"""What a run left behind, read from its files: the only thing that a person or another program has of it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from framework.checkpoint import find, load, read_manifest

_DESCRIBES_A_ROW = {"step", "epoch", "time", "nonfinite"}


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(run_dir: Path, name: str) -> dict[int, float]:
    """Return one metric's values by step. Fail the test if a step comes twice."""
    points = [(row["step"], row[name]) for row in rows(run_dir) if name in row]
    assert points, f"no {name} in {run_dir / 'metrics.jsonl'}"
    assert len(dict(points)) == len(points), f"steps that {name} has more than once: {points}"
    return dict(points)


def logged_names(run_dir: Path) -> set[str]:
    """Return the names of everything in metrics.jsonl, `step`, `epoch` and `time` among them."""
    return set(chain.from_iterable(rows(run_dir)))


def repeated(run_dir: Path) -> dict[tuple[int, str], int]:
    """Return how often metrics.jsonl has a (step, metric), for those it has more than once."""
    counts: Counter[tuple[int, str]] = Counter()
    for row in rows(run_dir):
        counts.update((row["step"], name) for name in row.keys() - _DESCRIBES_A_ROW)
    return {key: count for key, count in counts.items() if count > 1}


def events(run_dir: Path) -> EventAccumulator:
    """What TensorBoard shows of it."""
    found = EventAccumulator(str(run_dir), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    found.Reload()
    return found


def run_file(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return content


def results(run_dir: Path) -> dict[str, Any]:
    """Return the results in run.json: steps, epochs, seconds, ended_by, and what evaluations measured."""
    content: dict[str, Any] = run_file(run_dir)["results"]
    return content


def failure(run_dir: Path) -> dict[str, Any]:
    """Return the first failure in failure.json: its rank, step, cause."""
    content: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
    return content


def metrics(run_dir: Path) -> dict[str, float]:
    """Return the metrics of an evaluation, or those of a training's last validation and its test."""
    found = results(run_dir)
    if "metrics" in found:
        evaluated: dict[str, float] = found["metrics"]
        return evaluated
    values: dict[str, float] = {}
    for evaluation in (found["last"], found["test"]):
        if evaluation:
            values |= evaluation["metrics"]
    return values


def log(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "logs" / f"rank_{rank}.log").read_text()


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints there are. Fails the test where one isn't complete."""
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    return [read_manifest(path).step for path in found]


def pointed(run_dir: Path, pointer: str) -> int:
    """The step that `last` or `best` points to."""
    return read_manifest(find(run_dir / "checkpoints" / pointer)).step


def saved(run_dir: Path, which: str = "last") -> dict[str, Any]:
    """A whole checkpoint: model, training, generators."""
    return load(find(run_dir / "checkpoints" / which), map_location="cpu")


def weights(run_dir: Path, which: str = "last") -> dict[str, Tensor]:
    """A checkpoint's weights to evaluate and to use."""
    return load(find(run_dir / "checkpoints" / which), map_location="cpu", parts=["model"])["model"]


def assert_same(given: dict[str, Tensor], wanted: dict[str, Tensor], *, tolerance: float = 0.0) -> None:
    """The same tensors, of the same types; without a tolerance bit for bit."""
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(given[name], tensor, rtol=0.0, atol=tolerance)


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, other[name]) for name, tensor in one.items())
