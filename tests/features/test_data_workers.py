"""Loader workers: any picklable batch arrives, and a worker that fails in any way ends its rank with a report."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import framework
from framework import Datasets, StepOutput
from framework.errors import RunError
from tests.helpers.internals import ForkServer, _InWorker, call_module

Train = Callable[..., Path]
exhaustive = pytest.mark.exhaustive

FAILING = """
import os, signal, threading, time
import torch
from torch.utils.data import Dataset
from framework import Datasets, StepOutput

class TwoArguments(Exception):
    def __init__(self, where, why):
        super().__init__(f"{why} in {where}")

class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class OneWay:
    def __reduce__(self):
        return OneWay.read, (1,)

    @staticmethod
    def read(number):
        raise ValueError("can't be read again")

def fail(what):
    if what == "lock":
        return threading.Lock()
    if what == "one way":
        return OneWay()
    if what == "two arguments":
        raise TwoArguments("a sample", "a fault")
    if what == "no text":
        raise NoText
    if what == "SystemExit":
        raise SystemExit(3)
    if what == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if what == "os._exit":
        os._exit(0)
    if what == "os._exit(3)":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)

class Samples(Dataset):
    def __init__(self, what, is_in_sample):
        self.what, self.is_in_sample = what, is_in_sample
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 30 and self.is_in_sample:
            fail(self.what)
        return index, torch.full((4,), index / 40), torch.full((1,), index / 40)

def samples(what, is_in_sample=True):
    def collate(samples):
        numbers, inputs, targets = zip(*samples)
        batch = torch.stack(inputs), torch.stack(targets)
        return (*batch, fail(what)) if 30 in numbers and not is_in_sample else batch

    return Datasets(Samples(what, is_in_sample), collate_fn=collate)

class Task:
    def training_step(self, model, batch):
        return StepOutput(((model(batch[0]) - batch[1]) ** 2).mean(), len(batch[0]))
    validation_step = training_step
"""
RECIPE = """# @package _global_
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data: {datasets: {_target_: failing.samples, what: nothing}, batch_size: 5, num_workers: 1}
task: {_target_: failing.Task}
trainer: {max_epochs: 1}
"""


@pytest.fixture
def failure_of(train: Train, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train on data of which one batch fails in a worker; return what the report says of the first rank that failed."""

    def run(what: str, *overrides: str) -> dict[str, Any]:
        (tmp_path / "failing.py").write_text(FAILING)
        recipe = tmp_path / "conf/recipe/failing.yaml"
        recipe.parent.mkdir(parents=True)
        recipe.write_text(RECIPE)
        run_dir = train("recipe=failing", f"data.datasets.what='{what}'", *overrides, status=1)
        first: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
        return first

    return run


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("what", "causes"),
    [
        ("two arguments", ["Sample 30 of the train dataset raised TwoArguments: a fault in a sample", "in fail"]),
        ("SystemExit", ["raised SystemExit: 3", "in fail"]),
        ("SIGKILL", ["DataLoader worker (pid"]),
        pytest.param("no text", ["raised NoText: (its text can't be shown)"], marks=exhaustive),
        pytest.param("KeyboardInterrupt", ["raised KeyboardInterrupt"], marks=exhaustive),
        pytest.param("os._exit(3)", ["DataLoader worker (pid"], marks=exhaustive),
        pytest.param("os._exit", ["DataLoader worker (pid"], marks=exhaustive),
    ],
)
def test_a_worker_that_fails_ends_its_rank(failure_of: Callable[..., Any], what: str, causes: list[str]) -> None:
    first = failure_of(what)
    assert (first["kind"], first["rank"]) == ("exception", 0)
    for cause in causes:
        assert cause in first["cause"]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("what", "causes"),
    [
        ("lock", ["a worker loaded from the train dataset can't be sent to its rank: TypeError", "_thread.lock"]),
        ("one way", ["can't be read by its rank: ValueError: can't be read again"]),
        pytest.param("SystemExit", ["raised SystemExit: 3"], marks=exhaustive),
        pytest.param("two arguments", ["The collate function", "TwoArguments: a fault"], marks=exhaustive),
    ],
)
def test_an_unsendable_batch_ends_its_rank(failure_of: Callable[..., Any], what: str, causes: list[str]) -> None:
    first = failure_of(what, "+data.datasets.is_in_sample=false")
    for cause in causes:
        assert cause in first["cause"]


def test_a_worker_sends_classes_of_a_script(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that no module has, as those of a script or notebook, is the same one in rank and worker."""

    @dataclass
    class Batch:
        x: Tensor
        target: Any
        key: Callable[[], int]

    Target = namedtuple("Target", ["y"])

    class Squares(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.full((4,), float(index)), torch.tensor([float(index) ** 2])

    def collate(samples: list[Any]) -> Batch:
        inputs, squares = zip(*samples, strict=True)
        return Batch(torch.stack(inputs), Target(torch.stack(squares)), key=lambda: len(samples))

    class Task:
        def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
            assert type(batch) is Batch
            assert type(batch.target) is Target
            return StepOutput(((model(batch.x) - batch.target.y) ** 2).mean(), batch.key())

        validation_step = training_step

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(call_module, "_fork_server", lambda: nullcontext(fork_server))
    run = framework.train(
        model=partial(nn.Linear, 4, 1),
        task=Task(),
        optimizer=partial(torch.optim.SGD, lr=1e-5),
        data={"datasets": lambda: Datasets(Squares(), collate_fn=collate), "batch_size": 4, "num_workers": 1},
        trainer={"gpus": 0, "max_epochs": 1},
        name="classes",
    )
    assert (run.status, run.record["results"]["steps"]) == ("finished", 3)


class Pinned:
    """A batch that moves itself to page-locked memory."""

    is_pinned = False

    def pin_memory(self) -> Pinned:
        self.is_pinned = True
        return self


class Pins(Dataset[Any]):
    def __getitem__(self, key: str) -> Any:
        if key == "raise":
            raise ValueError("the sample")
        return {"batch": Pinned()}


def test_items_are_pinned_in_the_loaders_thread() -> None:
    """Without an accelerator torch has no such thread, so its calls are made here."""
    loads = _InWorker(Pins(), "train dataset")
    assert loads["good"].pin_memory()["batch"].is_pinned
    failed = loads["raise"].pin_memory()
    with pytest.raises(RunError, match="A data worker of the train dataset raised ValueError: the sample"):
        failed.unpacked("train dataset")
