"""Which checkpoints a run keeps, which is the best, what a failed run leaves, and starting from weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from framework import cli
from framework.checkpoint import find, read_manifest
from tests.helpers import results
from tests.helpers.loops import toy_loss

SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_train_batches=10", "trainer.max_epochs=5")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("checkpoint.monitor=null",), [40, 50]),
        pytest.param(("checkpoint.monitor=null", "checkpoint.save_last_k=1"), [50], marks=pytest.mark.exhaustive),
        pytest.param(
            ("checkpoint.monitor=null", "checkpoint.save_top_k=-1"), [10, 20, 30, 40, 50], marks=pytest.mark.exhaustive
        ),
        (("checkpoint.monitor=null", "checkpoint.save_top_k=-1", "checkpoint.every_n_epochs=2"), [20, 40, 50]),
        (("checkpoint.save_top_k=-1", "checkpoint.every_n_steps=15"), [10, 15, 20, 30, 40, 45, 50]),
        (
            (
                "checkpoint.monitor=null",
                "checkpoint.save_top_k=-1",
                "checkpoint.every_n_steps=15",
                "checkpoint.every_n_epochs=null",
            ),
            [15, 30, 45, 50],
        ),
        # The loss falls: the best ones are the last ones, or with mode=max the first ones.
        pytest.param(("checkpoint.save_top_k=2",), [40, 50], marks=pytest.mark.exhaustive),
        (("checkpoint.save_top_k=2", "checkpoint.mode=max"), [10, 20, 40, 50]),
        (("checkpoint.save_top_k=1", "checkpoint.save_last_k=3", "checkpoint.mode=max"), [10, 30, 40, 50]),
        (("checkpoint.save_top_k=0",), [40, 50]),
    ],
)
def test_what_is_kept(train, overrides, steps):
    run_dir = train(*SHORT, *overrides)
    assert results.saved_steps(run_dir) == steps
    folder = run_dir / "checkpoints"
    pointers = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert pointers <= {"best", "last"}
    assert {path.name for path in folder.iterdir()} == pointers | {f"step_{step:08d}" for step in steps}
    assert "last" in pointers


def test_nothing_is_kept_of_a_run_without_checkpoints(train):
    assert not (train(*SHORT, "checkpoint.enabled=false") / "checkpoints").exists()


@pytest.fixture(scope="module")
def worst(train_once):
    """A run for which the highest validation loss is the best: that of its first epoch."""
    return train_once(*SHORT, "checkpoint.mode=max")


def test_the_best_is_the_best_by_the_metric(worst):
    losses = results.curve(worst, "val/loss")
    assert results.pointed(worst, "best") == max(losses, key=lambda step: losses[step]) == 10
    assert results.pointed(worst, "last") == 50
    for pointer in ("best", "last"):
        manifest = read_manifest(find(worst / "checkpoints" / pointer))
        assert manifest.metrics == {"val/loss": losses[manifest.step]}
        assert manifest.metrics["val/loss"] == pytest.approx(toy_loss(results.weights(worst, pointer), part="val"))


def test_the_best_is_what_is_tested(worst):
    found = results.metrics(worst)["test/loss"]
    assert found == pytest.approx(toy_loss(results.weights(worst, "best"), part="test"), rel=1e-6)
    assert found != pytest.approx(toy_loss(results.weights(worst, "last"), part="test"), rel=1e-2)


def test_the_pointers_can_be_moved_with_the_folder(worst):
    assert (worst / "checkpoints" / "last").readlink() == Path("step_00000050")
    assert (worst / "checkpoints" / "best").readlink() == Path("step_00000010")


# A loss that is no longer finite


def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_good_checkpoint(train, capsys):
    """From the second epoch on, the learning rate is 1e27: step 12 is the first that computes with its weights."""
    explosion = ("scheduler=step", "scheduler.schedule.step_size=1", "scheduler.schedule.gamma=1e30")
    # Due after step 13, before the next log: what is about to be saved is looked at first.
    run_dir = train(*SHORT, *explosion, "checkpoint.every_n_steps=13", status=1)
    printed = capsys.readouterr().err
    assert "since step 12" in printed
    assert "optimizer.lr" in printed
    assert "Traceback" not in printed
    assert results.saved_steps(run_dir) == [10]
    weights = results.weights(run_dir)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    assert math.isfinite(toy_loss(weights, part="val"))
    assert results.run_file(run_dir)["status"] == "failed"
    assert max(row["step"] for row in results.rows(run_dir)) == 10


@pytest.mark.multiproc
def test_all_ranks_end_where_one_has_a_loss_that_is_not_finite(train, tmp_path, capsys):
    (tmp_path / "poisoned.py").write_text(POISONED)
    overrides = ("topology.procs_per_node=2", "+task.rank=1", "+task.step=14", "task._target_=poisoned.Poisoned")
    run_dir = train(*SHORT, "~task.loss", "~task.metrics", *overrides, status=1)
    printed = capsys.readouterr().err
    assert printed.count("since step 14") == 1
    assert results.saved_steps(run_dir) == [10]


POISONED = '''
import os
import torch
from framework import StepOutput

class Poisoned:
    """The loss of one rank is NaN at one step; the gradients stay finite."""
    def __init__(self, rank, step): self.rank, self.step, self.steps = rank, step, 0
    def training_step(self, model, batch):
        self.steps += 1
        output = self.validation_step(model, batch)
        poisoned = self.steps == self.step and os.environ["RANK"] == str(self.rank)
        return output._replace(loss=output.loss + float("nan")) if poisoned else output
    def validation_step(self, model, batch):
        return StepOutput(torch.nn.functional.mse_loss(model(batch[0]), batch[1]), len(batch[0]))
'''

# init_from


def test_init_from_takes_weights_and_nothing_else(train):
    trained = train(*SHORT, "seed=5", "optimizer=adam", "scheduler=cosine")
    frozen = (*SHORT, "trainer.max_epochs=1", "optimizer.lr=0")
    begun = train(*frozen, f"init_from={trained}")
    results.assert_same(results.weights(begun), results.weights(trained))
    assert results.results(begun)["steps"] == 10
    assert results.curve(begun, "val/loss").keys() == {10}
    assert begun != trained
    # Not from that run: the optimizer, the order of the samples, the generators.
    assert results.saved(begun)["training"]["optimizer"]["param_groups"][0]["lr"] == 0
    fresh = train(*frozen)
    for one, other in zip(results.saved(begun)["generators"], results.saved(fresh)["generators"], strict=True):
        assert torch.equal(one["cpu"], other["cpu"])


def test_init_from_takes_a_pointer_or_a_step_and_the_run_can_be_resumed(train, worst):
    frozen = (*SHORT, "trainer.max_epochs=1", "optimizer.lr=0")
    best = train(*frozen, f"init_from={worst}/checkpoints/best")
    results.assert_same(results.weights(best), results.weights(worst, "best"))
    step = train(*frozen, f"init_from={worst}/checkpoints/step_00000050")
    results.assert_same(results.weights(step), results.weights(worst, "last"))
    resumed = train(f"resume={step}", "trainer.max_epochs=2")
    assert results.results(resumed)["steps"] == 20


def test_weights_of_another_model_are_refused_by_name(train, worst, capsys):
    train("recipe=digits", "trainer.max_steps=1", f"init_from={worst}", status=2)
    printed = capsys.readouterr().err
    assert "ConvNet" in printed
    assert "features.0.weight" in printed
    assert "net1.weight" in printed
    assert "Traceback" not in printed
    assert len(printed.splitlines()) <= 8


def test_weights_of_another_shape_are_refused_with_both_shapes(train, worst, tmp_path, capsys):
    wider = "from torch import nn\nclass Wider(nn.Module):\n"
    wider += "    def __init__(self):\n        super().__init__()\n"
    wider += "        self.net1, self.net2 = nn.Linear(10, 12), nn.Linear(12, 5)\n"
    (tmp_path / "wider.py").write_text(wider)
    train(*SHORT, "model._target_=wider.Wider", f"init_from={worst}", status=2)
    printed = capsys.readouterr().err
    assert "net1.weight: the model has [12, 10], the checkpoint [10, 10]" in printed


def test_init_from_what_is_not_there_says_what_is(worst, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SHORT, f"init_from={worst}/checkpoints/step_00000030"]) == 2
    assert "step_00000050" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # nothing was begun
