"""A small recipe with everything that makes an exact resumption hard, and the differences between two runs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers import results
from tests.helpers.records import compare, read_rows

SIZE = 66
GLOBAL_BATCH = 12
STEPS_PER_EPOCH = 6
"""The last global batch of an epoch has 6 samples."""

RECIPE = '''
import os, random, signal, time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset
from framework import Datasets
from framework.strategies import DDP


class Net(nn.Module):
    """Buffers that training moves, draws in the forward, layers that are registered in another order than used."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(24, 1)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Conv1d(1, 4, 3)
        self.middle = nn.Linear(24, 24)
        self.drop = nn.Dropout(0.3)

    def stages(self, number):
        first = nn.Sequential(self.first, self.norm, nn.ReLU(), nn.Flatten())
        return [first, nn.Sequential(self.middle, nn.ReLU(), self.drop, self.last)]

    def forward(self, x):
        x = self.norm(self.first(x)).relu().flatten(1)
        return self.last(self.drop(self.middle(x).relu()))


class Noisy(Dataset):
    """Every sample is redrawn with all three generators. Notes which samples it was asked for."""

    def __init__(self, size, seed, notes=None):
        self.x = torch.randn(size, 1, 8, generator=torch.Generator().manual_seed(seed))
        self.notes = notes

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.notes is not None:
            with Path(f"{self.notes}_{os.environ['RANK']}").open("a") as file:
                file.write(f"{index}\\n")
        x = self.x[index]
        noise = torch.rand(1, 8) + random.random() + numpy.random.rand()
        return x + 0.1 * noise, x.sum(dim=1)


def noisy(size, notes="loaded"):
    return Datasets(train=Noisy(size, 0, notes), val=Noisy(14, 1))


class Forgetful:
    """DDP without its state."""

    def __init__(self, *, context):
        ddp = DDP(context=context)
        self.wrap, self.unwrap, self.accumulate = ddp.wrap, ddp.unwrap, ddp.accumulate
        self.before_evaluation = ddp.before_evaluation


class Unfreezes:
    """Begins with two layers frozen, trains one of them from step 3 on and the other one from step 10 on."""

    def on_fit_start(self, info):
        self.model = info.model
        self.model.first.requires_grad_(False)
        self.model.middle.requires_grad_(False)

    def on_train_step_end(self, report):
        if report.step == 2:
            self.model.middle.requires_grad_(True)
        if report.step == 9:
            self.model.first.requires_grad_(True)


class Dies:
    """Kills its rank once: after a step, in the forward of a later micro-batch of the next one, or while it saves.

    saved: the step whose checkpoint, written beside the training, has to be on the disk by then.
    """

    def __init__(self, after, where, saved, rank=0):
        self.after, self.where, self.saved, self.step = after, where, saved, None
        self.forwards = 0
        self.mine = os.environ["RANK"] == str(rank) and not Path("died").exists()

    def on_fit_start(self, info):
        self.step = info.start_step
        if self.where == "accumulating":
            info.model.register_forward_hook(lambda *given: self._forward(*given))

    def _forward(self, model, *_):
        if model.training and self.step == self.after:
            self.forwards += 1
            self._die("accumulating", when=self.forwards == 2)

    def on_train_step_end(self, report):
        self.step = report.step
        self._die("step", when=report.step == self.after)

    def state_dict(self):
        self._die("saving", when=self.step is not None and self.step >= self.after)
        return {}

    def _is_saved(self):
        pointers = Path("outputs/exact").glob("*/checkpoints/last")
        return f"step_{self.saved:08d}" in [str(pointer.readlink()) for pointer in pointers]

    def _die(self, where, when):
        if self.mine and when and where == self.where:
            deadline = time.monotonic() + 60
            while not self._is_saved():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''
YAML = f"""# @package _global_
defaults:
  - override /task: regression
  - override /logger: [jsonl, tensorboard]
model: {{_target_: recipes.exact.Net}}
data:
  datasets: {{_target_: recipes.exact.noisy, size: {SIZE}}}
  global_batch_size: {GLOBAL_BATCH}
  eval_batch_size: 5
optimizer: {{lr: 1.0e-2}}
trainer: {{max_epochs: 3, log_every_n_steps: 4, val_check_interval: 5, num_threads: 1}}
checkpoint: {{every_n_steps: 3, every_n_epochs: null}}
callbacks:
  recorder: {{_target_: tests.helpers.recorder.Recorder}}
  dies: {{_target_: recipes.exact.Dies, after: 10, where: step, rank: 0, saved: 9}}
"""


def write_recipe(folder: Path) -> None:
    """`recipe=exact` for commands that are run in `folder`."""
    for place, name, text in (("recipes", "exact.py", RECIPE), ("conf/recipe", "exact.yaml", YAML)):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / name).write_text(text)


def loaded(folder: Path) -> list[int]:
    """The training samples that the datasets of all ranks were asked for since the last call."""
    indices = []
    for file in folder.glob("loaded_*"):
        indices += [int(line) for line in file.read_text().split()]
        file.unlink()
    return indices


def taken(run_dir: Path) -> dict[int, list[int]]:
    """Step → the indices of the samples that it took, of all ranks, as recorded."""
    steps: dict[int, list[int]] = {}
    for file in sorted((run_dir / "record").glob("rank_*.jsonl")):
        for row in read_rows(file):
            steps.setdefault(row["step"], []).extend(chain.from_iterable(row["indices"]))
    return steps


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times and speeds."""
    rows = []
    for row in results.rows(run_dir):
        repeatable = {key: value for key, value in row.items() if not _is_of_speed(key)}
        if repeatable.keys() - {"step", "epoch"}:
            rows.append(repeatable)
    return rows


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs in two finished runs: last checkpoint, logged numbers, TensorBoard's curves, records."""
    lines = tree_differences(results.saved(one), results.saved(other))
    if numbers(one) != numbers(other):
        pairs = zip(numbers(one), numbers(other), strict=False)
        unequal = next((pair for pair in pairs if pair[0] != pair[1]), "more rows in one")
        lines.append(f"metrics.jsonl: {unequal}")
    if list(one.glob("events.out.tfevents.*")):
        ours = _curves(one)
        theirs = _curves(other)
        lines += [f"tensorboard: {tag}" for tag in {**ours, **theirs} if ours.get(tag) != theirs.get(tag)]
    if (one / "record").is_dir():
        first = compare(one, other)
        if first is not None:
            lines.append(f"record: {first}")
    return lines


def _is_of_speed(name: str) -> bool:
    return name == "time" or name.endswith("_per_s") or name.startswith(("time/", "skew/", "device/"))


def _curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = results.events(run_dir)
    tags = [tag for tag in events.Tags()["scalars"] if not _is_of_speed(tag)]
    curves = {}
    for tag in tags:
        curves[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return curves


def tree_differences(one: Any, other: Any, *, name: str = "") -> list[str]:
    """Return the entries in which two nested states differ. Tensors are compared bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        lines = [f"{name}.{key}: only in one" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            lines += tree_differences(one[key], other[key], name=f"{name}.{key}".lstrip("."))
        return lines
    if type(one) is not type(other):
        return [f"{name}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{name}: {len(one)} and {len(other)} entries"]
        lines = []
        for number, (ours, theirs) in enumerate(zip(one, other, strict=True)):
            lines += tree_differences(ours, theirs, name=f"{name}[{number}]")
        return lines
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if same else [f"{name}: the tensors differ"]
    are_nan = one != one and other != other
    return [] if one == other or are_nan else [f"{name}: {one!r} and {other!r}"]
