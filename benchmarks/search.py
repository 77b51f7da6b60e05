"""A search by TPE with pruning against random search, on digits: steps until the validation loss is as low.

    python -m benchmarks.search [--rounds 20]

A round is one seed. Random search trains 60 trials to their end. `sweep=optuna` with its defaults (TPE, median pruner)
has as many trials, most of which it stops early. Both search the learning rate, momentum, weight decay and width of a
small network on the 8×8 pixels; a trial has 10 epochs of 40 steps, with a validation after each.

What a search has reached after so many steps, those of all its trials together in the order they were chosen, is the
lowest validation loss so far. Of that, the median over the seeds counts. The steps compared are those in which it gets
as low as random search's gets in the end. Trials run one after another, and two searches at a time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.contest import Asked, ContestError, Row, Target, Unit, ours, run

ROUNDS = 20
TRIALS = 60
EPOCHS = 10
TARGET = Target(1 / 3)
_TIMEOUT_S = 1800.0
_METRIC = "val/loss"
_STEPS = Unit("steps", decimals=0)
_SPACE = (
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "optimizer.momentum=interval(0,0.99)",
    "optimizer.weight_decay=tag(log,interval(1e-6,0.1))",
    "model.width=tag(log,int(interval(4,256)))",
)
_FIXED = (
    "recipe=digits",
    "data.datasets.size=8",
    "~model",
    "+model._target_=benchmarks.search.SmallNet",
    "scheduler=none",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.num_threads=1",
    f"checkpoint.monitor={_METRIC}",
    "checkpoint.mode=min",
    "logger=jsonl",
    "sweep=optuna",
    f"sweep.n_trials={TRIALS}",
    "sweep.jobs=1",
    "sweep.test=none",
)
SEARCHES = {
    "TPE with pruning": (),
    "random": ("sweep.sampler._target_=optuna.samplers.RandomSampler", "sweep.pruner=null"),
}

Curve = Sequence[tuple[int, float]]
"""The lowest loss so far, at the step of each validation."""


class SmallNet(nn.Module):
    """One hidden layer over 8×8 pixels.

    Args:
        width: Of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)  # (B, 10)
        return scores


def search(name: str, seed: int) -> Curve:
    """Run a search and return its curve. Raises ContestError if the command fails."""
    with tempfile.TemporaryDirectory(prefix="search_") as folder:
        command = ours(f"{name}, seed {seed}", "-m", *_FIXED, *SEARCHES[name], *_SPACE, f"seed={seed}", outputs(folder))
        run(command, timeout_s=_TIMEOUT_S, reports=False)
        (sweep,) = Path(folder).glob("multirun/*")
        return curve_of(sweep)


def outputs(folder: str) -> str:
    return f"path.outputs={folder}"


def curve_of(sweep: Path) -> Curve:
    """Return the curve of a search by what its trials have logged."""
    steps_before = 0
    lowest = float("inf")
    curve = []
    for trial in json.loads((sweep / "sweep.json").read_text())["trials"]:
        run_dir = sweep / str(trial["number"])
        for step, loss in validations(run_dir).items():
            lowest = min(lowest, loss)
            curve.append((steps_before + step, lowest))
        # A pruned trial has trained a little beyond its last validation.
        steps_before += json.loads((run_dir / "run.json").read_text())["results"]["steps"]
    return curve


def validations(run_dir: Path) -> Mapping[int, float]:
    """Return the loss of each validation of a trial, by step; those that aren't numbers are left out."""
    losses = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        loss = row.get(_METRIC)
        if isinstance(loss, float):
            losses[row["step"]] = loss
    return losses


def reached(curve: Curve, steps: int) -> float:
    """Return the lowest loss within so many steps."""
    return min((loss for step, loss in curve if step <= steps), default=float("inf"))


def steps_to(level: float, curves: Sequence[Curve]) -> int | None:
    """Return the steps in which the median of the curves gets as low; None if it never does."""
    moments = set()
    for curve in curves:
        moments.update(step for step, _ in curve)
    for steps in sorted(moments):
        if statistics.median(reached(curve, steps) for curve in curves) <= level:
            return steps
    return None


def rows(asked: Asked) -> list[Row]:
    """Run all searches and compare them."""
    torch.set_num_threads(1)
    jobs = [(name, seed) for seed in range(asked.rounds_or(ROUNDS)) for name in SEARCHES]
    curves: dict[str, list[Curve]] = {name: [] for name in SEARCHES}
    claim = f"a search of {TRIALS} trials on digits: steps to the median of random search"
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for (name, seed), curve in zip(jobs, pool.map(lambda job: search(*job), jobs), strict=True):
                curves[name].append(curve)
                last_step, lowest = curve[-1]
                print(f"  seed {seed}: {name}: {lowest:.4f} in {last_step} steps", file=sys.stderr, flush=True)
        except ContestError as error:
            pool.shutdown(cancel_futures=True)
            print(error, file=sys.stderr, flush=True)
            return [Row("search", claim, "failed", "failed", target=str(TARGET))]
    return compared(claim, curves["TPE with pruning"], curves["random"])


def compared(claim: str, tpe: Sequence[Curve], chance: Sequence[Curve]) -> list[Row]:
    """Return the rows for the curves of both searches, one for each seed."""
    level = statistics.median(curve[-1][1] for curve in chance)
    their_steps = steps_to(level, chance)
    our_steps = steps_to(level, tpe)
    assert their_steps is not None
    whole = [curve[-1][0] for curve in chance]
    all_of_ours = [curve[-1][0] for curve in tpe]
    losses = Unit("", decimals=4)
    end = Row(
        "search",
        "… the lowest validation loss in the end",
        losses.show([curve[-1][1] for curve in tpe]),
        losses.show([curve[-1][1] for curve in chance]),
    )
    used = Row("search", "… steps of all trials", _STEPS.show(all_of_ours), _STEPS.show(whole))
    if our_steps is None:
        return [Row("search", claim, "never", _STEPS.show([their_steps]), target=str(TARGET), reached="no"), used, end]
    ratio = our_steps / their_steps
    is_reached = "yes" if TARGET.is_reached(ratio) else "no"
    first = Row(
        "search",
        claim,
        _STEPS.show([our_steps]),
        _STEPS.show([their_steps]),
        f"{ratio:.2f}",
        str(TARGET),
        is_reached,
    )
    return [first, used, end]


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "search", "--print", *sys.argv[1:]]))
