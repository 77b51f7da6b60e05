"""A search by TPE with pruning against random search, on digits: steps until the validation loss is as low.

    python -m benchmarks.search [--rounds 20]

A round is one seed. Random search trains 30 trials to their end. `sweep=optuna` with its defaults (TPE, median pruner)
has as many trials, most of which it stops early. Both search the learning rate, momentum, weight decay and width of a
small network on the 8×8 pixels; a trial has 10 epochs of 40 steps, with a validation after each.

The steps of all trials of a search count, in the order they were chosen. What random search has reached in the end is
its lowest validation loss, and the median of those over the seeds is the level. The ratio of a seed is the steps in
which TPE gets to the level ÷ all steps of random search; ranges are the quartiles. Trials run one after another, and
two searches at a time. Random search is exact, however busy the machine is. A trial that is to be stopped trains until
it is told so, a few steps, or a validation on a busy machine, and TPE then knows one value more.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.contest import Asked, ContestError, Row, Target, Unit, ours, run
from framework import Datasets

ROUNDS = 20
TRIALS = 30
EPOCHS = 10
TARGET = Target(1 / 3)
_TIMEOUT_S = 1800.0
_METRIC = "val/loss"
_STEPS = Unit("steps", decimals=0)
_SPACE = (
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "optimizer.momentum=interval(0,0.99)",
    "optimizer.weight_decay=tag(log,interval(1e-6,0.1))",
    "+model.width=tag(log,int(interval(4,256)))",
)
_FIXED = (
    "recipe=digits",
    "data=default",
    "data.batch_size=32",
    # They make pictures.
    "~task.metrics.confusion",
    "~task.metrics.mistakes",
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
"""The lowest loss so far, at the step of each validation and at the end."""


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


def small_digits(file: str) -> Datasets:
    """Return what `write_digits` wrote; scikit-learn takes longer to import than a trial to train."""
    parts = {name: TensorDataset(*tensors) for name, tensors in torch.load(file).items()}
    return Datasets(**parts)


def write_digits(file: Path) -> None:
    """Write the data of `recipe=digits`, with 8×8 pixels."""
    from recipes.digits import digits

    datasets = digits(size=8)
    torch.save({name: getattr(datasets, name).tensors for name in ("train", "val", "test")}, file)


def search(name: str, seed: int) -> Curve:
    """Run a search and return its curve. Raises ContestError if the command fails."""
    with tempfile.TemporaryDirectory(prefix="search_") as folder:
        file = Path(folder, "digits.pt")
        write_digits(file)
        command = ours(
            f"{name}, seed {seed}",
            "-m",
            *_FIXED,
            *SEARCHES[name],
            *_SPACE,
            f"+data.datasets={{_target_: benchmarks.search.small_digits, file: {file}}}",
            f"seed={seed}",
            f"path.outputs={folder}",
        )
        run(command, timeout_s=_TIMEOUT_S, reports=False)
        (sweep,) = Path(folder).glob("multirun/*")
        return curve_of(sweep)


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
    curve.append((steps_before, lowest))
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
    their_steps = [curve[-1][0] for curve in chance]
    level = statistics.median(curve[-1][1] for curve in chance)
    our_steps = [steps_to(level, curve) for curve in tpe]
    ratios = [our / their for our, their in zip(our_steps, their_steps, strict=True)]
    ratio = statistics.median(ratios)
    is_reached = "yes" if TARGET.is_reached(ratio) else "no"
    losses = Unit("nats", decimals=4)
    return [
        Row(
            "search",
            claim,
            _quartiles(our_steps, decimals=0),
            _quartiles(their_steps, decimals=0),
            _quartiles(ratios, decimals=2),
            str(TARGET),
            is_reached,
        ),
        Row(
            "search",
            "… the lowest validation loss of all trials",
            losses.show([curve[-1][1] for curve in tpe]),
            losses.show([curve[-1][1] for curve in chance]),
        ),
        Row("search", "… steps of all trials", _STEPS.show([curve[-1][0] for curve in tpe]), _STEPS.show(their_steps)),
    ]


def steps_to(level: float, curve: Curve) -> float:
    """Return the steps in which a search gets to the level; infinity if it never does."""
    return next((step for step, loss in curve if loss <= level), math.inf)


def _quartiles(values: Sequence[float], *, decimals: int) -> str:
    """Return the median and both quartiles. One that is infinite is `never`."""
    ordered = sorted(values)
    last = len(ordered) - 1
    # Interpolating between infinite values gives NaN.
    shown = []
    for value in (statistics.median(ordered), ordered[round(last / 4)], ordered[round(last * 3 / 4)]):
        shown.append("never" if math.isinf(value) else f"{value:,.{decimals}f}")
    return f"{shown[0]} ({shown[1]}–{shown[2]})"


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "search", "--print", *sys.argv[1:]]))
