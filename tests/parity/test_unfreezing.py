"""Parameters that are unfrozen and frozen during training: every strategy ends where a plain loop does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from framework.seed import seed_everything
from tests.helpers import results

pytestmark = pytest.mark.usefixtures("own_state")
Train = Callable[..., Path]

STEPS, BATCH, CLIP = 9, 10, 0.5
UNFROZEN_AFTER, FROZEN_AFTER = 2, 6
RECIPE = '''
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from framework import Datasets

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self[0].requires_grad_(False)

def data():
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    return Datasets(train=TensorDataset(x, x.sum(dim=1, keepdim=True)))

class Schedule:
    """Unfreezes the first layer and later freezes the second one; with `rank`, on that rank alone."""
    def __init__(self, rank=None): self.rank = rank
    def on_fit_start(self, info): self.model = info.model
    def on_train_step_end(self, report):
        if self.rank in (None, int(os.environ["RANK"])):
            if report.step == 2: self.model[0].requires_grad_(True)
            if report.step == 6: self.model[2].requires_grad_(False)

class Nudge:
    """Changes a weight on rank 1 by what is lost in 7 digits."""
    def on_fit_start(self, info): self.model = info.model
    def on_train_step_end(self, report):
        if os.environ["RANK"] == "1" and report.step == 4:
            with torch.no_grad(): self.model[2].weight.mul_(1 + 1e-6)
'''
YAML = """# @package _global_
defaults:
  - override /task: regression
  - override /logger: none
model: {_target_: recipes.thaw.Net}
data: {datasets: {_target_: recipes.thaw.data}, global_batch_size: 10, shuffle: false}
optimizer: {_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9, weight_decay: 0.1}
trainer: {max_steps: 9, num_threads: 1, gradient_clip_val: 0.5, log_every_n_steps: 4}
checkpoint: {every_n_steps: 3}
callbacks:
  schedule: {_target_: recipes.thaw.Schedule}
"""
SHARDED = ("strategy=fsdp", "strategy.min_num_params=30")
COPIES = ("strategy=hsdp", "strategy.min_num_params=30", "strategy.data_parallel_shard_degree=2")
STAGES = ("strategy=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=4")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    for place, name, text in (("recipes", "thaw.py", RECIPE), ("conf/recipe", "thaw.yaml", YAML)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / name).write_text(text)


def plain() -> dict[str, Tensor]:
    seed_everything(0, rank=0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    inputs = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    for step, batch in enumerate(inputs.split(BATCH), start=1):
        nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step == UNFROZEN_AFTER:
            model[0].requires_grad_(True)
        if step == FROZEN_AFTER:
            model[2].requires_grad_(False)
    return model.state_dict()


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (1, ()),
        (2, ("strategy=allreduce",)),
        (3, ("strategy=ddp",)),
        (3, SHARDED),
        pytest.param(1, ("trainer.compile=default",), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=ddp", "trainer.compile=default"), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=ddp", "strategy.static_graph=true"), marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=ddp", "strategy.comm_hook=butterfly"), marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=ddp", "strategy.comm_hook=powersgd"), marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=allreduce", "trainer.accumulate_grad_batches=2"), marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=butterfly",), marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=local_sgd", "strategy.warmup_steps=100"), marks=pytest.mark.exhaustive),
        pytest.param(4, COPIES, marks=pytest.mark.exhaustive),
        pytest.param(4, STAGES, marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=pipeline",), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.multiproc
def test_training_ends_where_a_plain_loop_does(train: Train, processes: int, options: tuple[str, ...]) -> None:
    """With clipping by the norm of what is trained, momentum and weight decay, which must not move what is frozen."""
    run = train("recipe=thaw", f"topology.procs_per_node={processes}", *options)
    results.assert_same(results.weights(run), plain(), tolerance=1e-6 if processes > 1 or options else 0.0)


@pytest.mark.multiproc
@pytest.mark.parametrize("every", [1, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_ranks_that_would_train_different_parameters_are_told_apart(
    train: Train, capfd: pytest.CaptureFixture[str], every: int
) -> None:
    """With the next log all ranks learn of it; before, the others are waited for until the time-out."""
    ranks = ("topology.procs_per_node=2", "+callbacks.schedule.rank=1", "backend.timeout=8")
    train("recipe=thaw", *ranks, f"trainer.log_every_n_steps={every}", "checkpoint=none", status=1)
    told = capfd.readouterr().err
    if every == 1:
        assert (
            "different parameters from here on:\n  0.weight on ranks 1, not on 0\n  0.bias on ranks 1, not on 0" in told
        )
    else:
        assert "has changed on rank 1 (unfrozen: 0.weight, 0.bias), and another rank made no such change" in told
    assert "Set requires_grad on every rank, after the same step" in told


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("processes", "options", "apart"),
    [
        (3, ("strategy=allreduce",), "0, 2 | 1"),
        pytest.param(4, COPIES, "1 | 3", marks=pytest.mark.exhaustive),
        pytest.param(4, STAGES, "0 | 1", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_replicas_that_drift_apart_are_noticed_with_the_next_checkpoint(
    train: Train, capfd: pytest.CaptureFixture[str], processes: int, options: tuple[str, ...], apart: str
) -> None:
    nudge = "+callbacks.nudge._target_=recipes.thaw.Nudge"
    run = train("recipe=thaw", nudge, f"topology.procs_per_node={processes}", *options, status=1)
    told = capfd.readouterr().err
    assert f"after step 6 the ranks have different values of 2.weight (ranks {apart})" in told
    assert results.pointed(run, "last") == 3
