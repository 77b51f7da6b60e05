"""What a task learns of its micro-batch: a loss that exchanges between ranks leaves stand-ins out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework import BatchInfo, Objective, StepOutput
from tests.helpers import results
from tests.helpers.recipes import write_recipe
from tests.unit.small_trainer import make_trainer, settings

CASES = "tests.features.contrastive_case"


@pytest.mark.multiproc
def test_a_contrastive_loss_is_that_of_one_process(train, tmp_path):
    recipe = {
        "defaults": [{"override /logger": "jsonl"}],
        "model": {"_target_": "torch.nn.Linear", "in_features": 6, "out_features": 4},
        "task": {"_target_": f"{CASES}.Contrastive"},
        "data": {"datasets": {"_target_": f"{CASES}.pairs"}, "global_batch_size": 16},
        "trainer": {"max_epochs": 2, "log_every_n_steps": 1, "precision": "64-true"},
        "optimizer": {"lr": 0.1},
    }
    write_recipe(tmp_path, "contrastive", recipe)
    whole = train("recipe=contrastive")
    for ranks in (2, 3):
        run_dir = train("recipe=contrastive", f"topology.procs_per_node={ranks}")
        results.assert_same(results.weights(run_dir), results.weights(whole), tolerance=1e-6)
        assert results.curve(run_dir, "train/loss") == pytest.approx(results.curve(whole, "train/loss"), abs=1e-6)


class Notes:
    def __init__(self) -> None:
        self.seen: list[BatchInfo] = []

    def training_step(self, model: nn.Module, batch: Any, info: BatchInfo) -> StepOutput:
        self.seen.append(info)
        return StepOutput(model(batch[0]).square().mean(), len(batch[0]))

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(torch.zeros(()), 0)


def test_batch_info_has_step_epoch_and_samples():
    task = Notes()
    make_trainer(settings(accumulate_grad_batches=2), task=task).fit()
    assert task.seen[0] == BatchInfo(step=0, epoch=0, global_count=8, is_stand_in=False)
    assert task.seen[-1] == BatchInfo(step=5, epoch=1, global_count=6, is_stand_in=False)
    assert Objective("one", task.training_step, "first").name == "one"
