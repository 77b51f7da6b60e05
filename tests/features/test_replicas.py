"""Several processes are one run: what is evaluated is what is saved, and what one rank asks for all do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_recipe")]
Train = Callable[..., Path]

RECIPE = '''
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from framework import Datasets, Stop

class Normed(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

def drifting(size=96):
    """The first half is elsewhere than the second, so that ranks see different statistics."""
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0)) + torch.arange(size)[:, None] / 8
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    return Datasets(train=data, val=data)

class StopsOn:
    """Asks to stop after the first step, on one rank."""
    def __init__(self, rank, answer="stop"): self.rank, self.answer = rank, answer
    def on_train_step_end(self, report):
        if os.environ["RANK"] == str(self.rank):
            return Stop("had enough") if self.answer == "stop" else True
'''
YAML = """# @package _global_
defaults:
  - override /task: regression
model: {_target_: recipes.normed.Normed}
data: {datasets: {_target_: recipes.normed.drifting}, batch_size: 8, shuffle: false}
trainer: {max_epochs: 2}
optimizer: {lr: 1.0e-3}
"""


@pytest.fixture
def own_recipe(tmp_path: Path) -> None:
    for folder, name, text in (("recipes", "normed.py", RECIPE), ("conf/recipe", "normed.yaml", YAML)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(text)


@pytest.mark.parametrize(
    "callbacks",
    [pytest.param((), marks=pytest.mark.exhaustive), ("callbacks=ema", "callbacks.ema.decay=0.5")],
    ids=["plain", "ema"],
)
def test_validation_is_of_the_weights_and_statistics_that_are_saved(train: Train, callbacks: tuple[str, ...]) -> None:
    run = train("recipe=normed", "topology.procs_per_node=2", *callbacks)
    seen = results.metrics(run)["val/loss"]
    again = train("job=eval", f"checkpoint.path={run}", "eval.part=val", "topology.procs_per_node=1")
    assert results.metrics(again)["val/loss"] == pytest.approx(seen, rel=1e-5)


@pytest.mark.parametrize(("procs", "steps"), [pytest.param(1, 1, marks=pytest.mark.exhaustive), (2, 6)])
def test_a_request_to_stop_is_agreed_on_at_the_end_of_the_epoch_at_the_latest(
    train: Train, procs: int, steps: int
) -> None:
    run = train(
        "recipe=normed",
        f"topology.procs_per_node={procs}",
        f"+callbacks.mine={{_target_:recipes.normed.StopsOn,rank:{procs - 1}}}",
        *("trainer.log_every_n_steps=1000", "trainer.check_val_every_n_epoch=null", "checkpoint=none"),
        "trainer.max_epochs=50",
    )
    found = results.results(run)
    assert (found["ended_by"], found["steps"]) == ("had enough", steps)


def test_another_answer_than_stop_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("recipe=normed", "+callbacks.mine={_target_:recipes.normed.StopsOn,rank:0,answer:yes}", status=2)
    assert "A callback answered True. Answer framework.Stop(reason)" in capsys.readouterr().err


def test_a_limited_validation_is_of_the_same_samples_on_any_number_of_processes(train: Train) -> None:
    limits = ("trainer.limit_val_batches=2", "data.eval_batch_size=8", "trainer.max_steps=1", "optimizer.lr=0.0")
    common = ("recipe=normed", *limits, "trainer.val_check_interval=1", "data.global_batch_size=8")
    one, two = (results.metrics(train(*common, f"topology.procs_per_node={procs}")) for procs in (1, 2))
    # BatchNorm's statistics are of different shares after one step; the samples are the same, so it's close.
    assert two["val/loss"] == pytest.approx(one["val/loss"], rel=0.05)
