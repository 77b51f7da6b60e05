"""What a task learns of its micro-batch, and losses over the samples of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework import BatchInfo, Objective, StepOutput
from tests.features import contrastive_case
from tests.helpers import results
from tests.helpers.documents import write_shown_files
from tests.helpers.internals import seed_everything
from tests.helpers.recipes import write_recipe
from tests.helpers.source import ROOT
from tests.unit.small_trainer import make_trainer, settings

CASES = "tests.features.contrastive_case"
# The last of five global batches has 1 sample, or 6: with three processes some have none.
SIZES = {"SimCLR": 65, "CLIP": 70, "MoCo": 65}


def write_contrastive(folder: Any, task: str, **trainer: Any) -> None:
    recipe = {
        "defaults": [{"override /logger": "jsonl"}],
        "model": {"_target_": f"{CASES}.Towers"},
        "task": {"_target_": f"{CASES}.{task}"},
        "data": {
            "datasets": {"_target_": f"{CASES}.pairs", "size": SIZES.get(task, 32)},
            "global_batch_size": contrastive_case.BATCH,
            "shuffle": False,
        },
        "trainer": {"max_epochs": contrastive_case.EPOCHS, "log_every_n_steps": 1, "precision": "64-true", **trainer},
        "optimizer": {"lr": contrastive_case.LR, "momentum": 0.0, "weight_decay": 0.0},
    }
    write_recipe(folder, task.lower(), recipe)


def trained_by_loop(task: str) -> dict[str, Tensor]:
    dataset: Any = contrastive_case.pairs(SIZES[task]).train
    columns = [column.double().split(contrastive_case.BATCH) for column in dataset.tensors]
    batches = [list(batch) for batch in zip(*columns, strict=True)]
    # The first weights of a run with seed 0.
    seed_everything(0, rank=0)
    model = contrastive_case.Towers().double()
    contrastive_case.LOOPS[task](model, batches * contrastive_case.EPOCHS)
    return model.state_dict()


@pytest.mark.multiproc
@pytest.mark.parametrize(("task", "strategy"), [("SimCLR", "allreduce"), ("CLIP", "ddp"), ("MoCo", "allreduce")])
def test_a_contrastive_loss_is_that_of_one_process(train, tmp_path, task, strategy):
    write_contrastive(tmp_path, task)
    wanted = trained_by_loop(task)
    curves = []
    for ranks in (1, 2, 3):
        on_ranks = [f"topology.procs_per_node={ranks}"]
        if ranks > 1:
            on_ranks.append(f"strategy={strategy}")
        run_dir = train(f"recipe={task.lower()}", *on_ranks)
        results.assert_same(results.weights(run_dir), wanted, tolerance=1e-9)
        curves.append(results.curve(run_dir, "train/loss"))
    assert curves[1] == pytest.approx(curves[0], abs=1e-9)
    assert curves[2] == pytest.approx(curves[0], abs=1e-9)


@pytest.mark.multiproc
def test_the_documented_contrastive_loss(train, tmp_path):
    write_shown_files(tmp_path, pages=[ROOT / "docs/own_code.md"])
    short = ("recipe=halves", "trainer.max_epochs=1", "trainer.precision=64-true", "optimizer.lr=0.0001")
    one = train(*short)
    two = train(*short, "topology.procs_per_node=2")
    results.assert_same(results.weights(two), results.weights(one), tolerance=1e-9)
    assert results.metrics(two) == pytest.approx(results.metrics(one), abs=1e-9)


@pytest.mark.multiproc
def test_a_contrastive_loss_of_uneven_shards(train, tmp_path):
    """In the third step one process has four samples, and the other an old batch of eight as a stand-in."""
    write_contrastive(tmp_path, "CLIP")
    dataset: Any = contrastive_case.pairs(sum(contrastive_case.SHARDS)).train
    of_shards = []
    for columns in zip(*[column.double().split(contrastive_case.SHARDS) for column in dataset.tensors], strict=True):
        of_shards.append([column.split(contrastive_case.BATCH // 2) for column in columns])
    batches = []
    for step in range(3):
        parts = [[column[step] for column in columns] for columns in of_shards if step < len(columns[0])]
        batches.append([torch.cat(column) for column in zip(*parts, strict=True)])
    seed_everything(0, rank=0)
    model = contrastive_case.Towers().double()
    contrastive_case.clip_loop(model, batches * contrastive_case.EPOCHS)

    shards = (f"data.datasets._target_={CASES}.shards", "~data.datasets.size", "data.stream=join")
    run_dir = train("recipe=clip", "topology.procs_per_node=2", *shards)
    results.assert_same(results.weights(run_dir), model.state_dict(), tolerance=1e-9)


@pytest.mark.multiproc
def test_a_gather_that_would_be_wrong_is_refused(train, tmp_path, capfd):
    write_contrastive(tmp_path, "CLIP")
    write_contrastive(tmp_path, "TwoViewsAtOnce")
    two = "topology.procs_per_node=2"
    train("recipe=clip", two, "trainer.accumulate_grad_batches=2", status=2)
    assert "2 micro-batches" in capfd.readouterr().err
    train("recipe=clip", two, "strategy=local_sgd", status=2)
    assert "LocalSGD isn't one. Use strategy=ddp" in capfd.readouterr().err
    train("recipe=twoviewsatonce", two, status=2)
    assert "shape (16, 4) for a micro-batch of 8 samples" in capfd.readouterr().err


class Notes:
    """Keeps what it is given, with the first inputs of a micro-batch."""

    def __init__(self) -> None:
        self.seen: list[BatchInfo] = []
        self.inputs: list[Tensor] = []

    def training_step(self, model: nn.Module, batch: Any, info: BatchInfo) -> StepOutput:
        self.seen.append(info)
        self.inputs.append(batch[0])
        return StepOutput(model(batch[0]).square().mean(), len(batch[0]))

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(torch.zeros(()), 0)


def test_batch_info_has_step_epoch_and_samples():
    task = Notes()
    make_trainer(settings(accumulate_grad_batches=2), task=task).fit()
    nothing = torch.zeros(0)
    assert task.seen[0] == BatchInfo(step=0, epoch=0, global_count=8, is_stand_in=False, positions=nothing)
    assert task.seen[-1] == BatchInfo(step=5, epoch=1, global_count=6, is_stand_in=False, positions=nothing)
    assert [info.positions.tolist() for info in task.seen[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert task.seen[-1].positions.tolist() == [3, 4, 5]
    assert Objective("one", task.training_step, "first").name == "one"


VALIDATES_WITH_INFO = """
class ValidatesWithInfo:
    def training_step(self, model, batch, info):
        raise AssertionError("not reached")

    validation_step = training_step
"""


def test_a_validation_step_gets_no_info(train, tmp_path, capfd):
    (tmp_path / "own.py").write_text(VALIDATES_WITH_INFO)
    train("recipe=toy", "~task", "+task={_target_:own.ValidatesWithInfo}", status=2)
    printed = capfd.readouterr().err
    assert "validation_step of ValidatesWithInfo needs `info`, which only training steps get" in printed
    assert "Traceback" not in printed
