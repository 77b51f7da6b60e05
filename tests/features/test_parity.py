"""`job=parity` as it is typed: recipes that are the same on any number of processes, and those that aren't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import cli
from tests.helpers.command import run_framework

pytestmark = pytest.mark.multiproc

Compared = Callable[..., tuple[int, dict[str, Any], str]]

RECIPE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from framework import Datasets, StepOutput


def points(size=45):
    """Few enough that an epoch's last batch is uneven; the first are elsewhere than the last."""
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(0)) + torch.arange(size)[:, None] / 16
    return Datasets(train=TensorDataset(x, x[:, :2].tanh()))


class Plain(nn.Module):
    """With all that makes comparing hard: a module called twice, one never called, tied weights, tuples and dicts."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.split, self.head = nn.Linear(6, 16), nn.Linear(16, 16), Split(), nn.Linear(16, 2)
        self.same, self.act, self.drop = self.head, nn.ReLU(), nn.Dropout(0.4)
        self.register_buffer("offset", torch.zeros(2))
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        x = self.drop(self.act(self.embed(x)))
        for _ in range(2):
            one, other = self.split(self.mix(x))["parts"]
            x = x + one - other
        return self.same(x) + self.offset


class Split(nn.Module):
    def forward(self, x): return {"parts": (x.relu(), 0.1 * x), "size": len(x)}


class Normed(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x): return self.head(nn.functional.dropout(self.embed(x), 0.2))


class Summed:
    """A task that gives a sum over samples for their mean."""
    def training_step(self, model, batch):
        x, y = batch
        return StepOutput((model(x) - y).square().sum(), len(x))
    validation_step = training_step
'''
YAML = """# @package _global_
defaults:
  - override /task: regression
  - override /optimizer: adam
model: {_target_: recipes.mine.Plain}
data: {datasets: {_target_: recipes.mine.points}, batch_size: 16}
trainer: {max_epochs: 5}
"""


@pytest.fixture
def compared(warm, tmp_path, monkeypatch, capfd, own_state) -> Compared:
    """Exit status, parity.json and what is printed, in a folder with the recipe; nothing else is left of it."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> tuple[int, dict[str, Any], str]:
        before = set(tmp_path.glob("outputs/*/parity/*"))
        status = cli.main(["job=parity", "trainer.gpus=0", *overrides], warm=warm)
        (folder,) = set(tmp_path.glob("outputs/*/parity/*")) - before
        assert list(folder.rglob("*.pt")) == []
        printed = capfd.readouterr()
        assert printed.err == ""
        return status, json.loads((folder / "parity.json").read_text()), printed.out

    return run


@pytest.mark.parametrize(
    ("overrides", "layers", "steps"),
    [
        # Adam, an epoch whose last batch is of 13 samples, and then of the next epoch.
        (("recipe=mine", "parity.processes=3", "parity.steps=4"), 6, 4),
        (("recipe=mine", "trainer.accumulate_grad_batches=3", "data.global_batch_size=16", "seed=3"), 6, 3),
        (("recipe=toy_model_parallel", "parity.steps=1"), 4, 1),
        (("recipe=digits", "parity.steps=2", "data.batch_size=8"), 10, 2),
    ],
    ids=["uneven", "accumulated", "model-parallel", "convolutions"],
)
def test_the_same(compared: Compared, overrides: tuple[str, ...], layers: int, steps: int) -> None:
    status, answer, printed = compared(*overrides)
    assert (status, answer["same"], answer["departure"], answer["unsure"]) == (0, True, None, [])
    assert "The same: " in printed
    # Modules; not those that are never called, nor those that give what the one before has given, as without dropout.
    assert answer["parts"]["layers"]["compared"] == layers
    assert answer["parts"]["gradients"]["greatest"]["allowed"] < 1e-3
    assert answer["steps"] == steps


def test_batch_norm_is_named(compared: Compared) -> None:
    status, answer, printed = compared("recipe=mine", "model._target_=recipes.mine.Normed", "parity.steps=2")
    departure = answer["departure"]
    assert (status, answer["same"], departure["step"]) == (1, False, 1)
    assert (departure["reason"], departure["layer"]["name"], departure["layer"]["type"]) == (
        "batch_norm",
        "1",
        "BatchNorm1d",
    )
    assert departure["layer"]["difference"] > 0.01
    assert "the output of 1 (BatchNorm1d)" in printed
    assert "strategy.sync_batchnorm=true" in printed
    assert "8 of 16" in printed


def test_a_sum_for_a_mean_is_found(compared: Compared) -> None:
    task = ("task._target_=recipes.mine.Summed", "~task.loss", "~task.metrics")
    status, answer, printed = compared("recipe=mine", *task, "parity.steps=1")
    departure = answer["departure"]
    assert (status, departure["reason"], departure["layer"]) == (1, "sum", None)
    assert departure["factor"] == pytest.approx(0.5, abs=1e-4)
    assert "The loss is a sum over samples" in printed


def test_random_numbers_in_the_forward_are_found(compared: Compared) -> None:
    status, answer, printed = compared("recipe=mine", "model._target_=recipes.mine.Noisy", "parity.steps=1")
    layer = answer["departure"]["layer"]
    assert (status, answer["departure"]["reason"]) == (1, "random")
    assert (layer["name"], layer["kind"], layer["before"]["name"]) == ("head", "entered", "embed")
    assert "Noisy draws random numbers in its forward" in printed


def test_a_training_that_fails_is_said_to_have(compared: Compared, warm, capfd, tmp_path) -> None:
    status = cli.main(["job=parity", "trainer.gpus=0", "recipe=mine", "optimizer.lr=1e30", "parity.steps=3"], warm=warm)
    printed = capfd.readouterr()
    assert status == 1
    assert "The training loss is" in printed.err
    assert "Nothing was compared: the training with 2 processes failed." in printed.out
    assert list(tmp_path.rglob("*.pt")) == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("-m", "seed=0,1"), ["can't go with a sweep"]),
        (("parity.processes=1",), ["parity.processes=1", "2"]),
        (("resume=auto",), ["can't go with job=parity", "init_from"]),
        (("topology.nnodes=2",), ["compares on one machine"]),
        (("launcher=in_place",), ["launcher=local"]),
        (("parity.processes=20", "data.batch_size=8"), ["data.global_batch_size=8", "20"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_compared_is_refused(warm, tmp_path, monkeypatch, capfd, own_state, arguments, parts) -> None:
    monkeypatch.chdir(tmp_path)
    if "resume=auto" in arguments:
        assert cli.main(["recipe=toy", "trainer.gpus=0", "trainer.max_steps=1", "checkpoint=none"], warm=warm) == 0
        (run,) = tmp_path.glob("outputs/toy/*")
        arguments = (f"resume={run}",)
    capfd.readouterr()
    left = set(tmp_path.rglob("*"))
    assert cli.main(["job=parity", "recipe=toy", "trainer.gpus=0", *arguments], warm=warm) == 2
    printed = capfd.readouterr().err
    assert [part for part in parts if part not in printed] == [], printed
    assert set(tmp_path.rglob("*")) == left


def test_the_command_ends_with_the_status_and_leaves_no_process(tmp_path: Path) -> None:
    result = run_framework("job=parity", "recipe=toy", "trainer.gpus=0", "parity.steps=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The same: ToyModel gets the same weights from 1 process and from 2 in 1 step" in result.stdout
