"""Which checkpoints a run keeps, which is the best, what a failed run leaves, and starting from weights."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path

import pytest
import torch

from framework.checkpoint import find, read_manifest
from tests.helpers import results
from tests.helpers.loops import toy_loss

SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_train_batches=10", "trainer.max_epochs=5")
WORST = (*SHORT, "checkpoint.mode=max")
"""A run for which the highest validation loss is the best: that of its first epoch."""


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("checkpoint.monitor=null", "checkpoint.save_top_k=-1", "checkpoint.every_n_epochs=2"), [20, 40, 50]),
        (("checkpoint.save_top_k=2", "checkpoint.save_last_k=1", "checkpoint.every_n_steps=15"), [40, 50]),
        (("checkpoint.enabled=false",), []),
    ],
)
def test_which_checkpoints_are_kept(train, overrides, steps):
    run_dir = train(*SHORT, *overrides)
    assert results.saved_steps(run_dir) == steps
    assert (run_dir / "checkpoints").exists() == bool(steps)


def test_last_and_best_are_links_best_is_tested(shared_run):
    worst = shared_run(*WORST)
    losses = results.curve(worst, "val/loss")
    folder = worst / "checkpoints"
    assert results.saved_steps(worst) == [10, 40, 50]
    assert max(losses, key=lambda step: losses[step]) == 10
    for pointer, step in (("best", 10), ("last", 50)):
        assert str((folder / pointer).readlink()) == f"step_{step:08d}"
        manifest = read_manifest(find(folder / pointer))
        assert manifest.metrics == {"val/loss": losses[step]}
        assert manifest.metrics["val/loss"] == pytest.approx(toy_loss(results.weights(worst, pointer), part="val"))
    found = results.metrics(worst)["test/loss"]
    assert found == pytest.approx(toy_loss(results.weights(worst, "best"), part="test"), rel=1e-6)
    assert found != pytest.approx(toy_loss(results.weights(worst, "last"), part="test"), rel=1e-2)


# A loss that is no longer finite


def test_a_non_finite_loss_keeps_earlier_checkpoints(train, capsys):
    """From the second epoch on, the learning rate is 1e27: step 12 is the first that computes with its weights."""
    explosion = ("scheduler=step", "scheduler.schedule.step_size=1", "scheduler.schedule.gamma=1e30")
    # Due after step 13, before the next log: what is about to be saved is looked at first.
    run_dir = train(*SHORT, *explosion, "checkpoint.every_n_steps=13", status=1)
    printed = capsys.readouterr().err
    assert "step 12" in printed
    assert "optimizer.lr" in printed
    assert "Traceback" not in printed
    assert results.saved_steps(run_dir) == [10]
    weights = results.weights(run_dir)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    assert math.isfinite(toy_loss(weights, part="val"))
    assert results.run_file(run_dir)["status"] == "failed"
    assert max(row["step"] for row in results.rows(run_dir)) == 10


def test_weights_whose_squares_overflow_are_finite(train, tmp_path):
    (tmp_path / "large.py").write_text(
        "import torch\n"
        "class Large(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(10, 5)\n"
        "        self.unused = torch.nn.Parameter(torch.tensor([-1e30]))\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) + 0 * self.unused\n"
    )
    run_dir = train(*SHORT, "model={_target_: large.Large}")
    assert results.weights(run_dir)["unused"] == -1e30


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


@pytest.mark.multiproc
def test_a_non_finite_loss_ends_all_ranks(train, tmp_path, capsys):
    (tmp_path / "poisoned.py").write_text(POISONED)
    overrides = ("topology.procs_per_node=2", "+task.rank=1", "+task.step=14", "task._target_=poisoned.Poisoned")
    run_dir = train(*SHORT, "~task.loss", "~task.metrics", *overrides, status=1)
    assert capsys.readouterr().err.count("step 14") == 1
    assert results.saved_steps(run_dir) == [10]


# init_from


def test_init_from_takes_weights_and_nothing_else(train, shared_run):
    """It takes no optimizer state, order of samples or generators, and accepts a run, a pointer or a step."""
    trained = train(*SHORT, "seed=5", "optimizer=adam", "scheduler=cosine")
    frozen = (*SHORT, "trainer.max_epochs=1", "optimizer.lr=0")
    fresh = train(*frozen)
    begun = train(*frozen, f"init_from={trained}")
    results.assert_same(results.weights(begun), results.weights(trained))
    assert results.results(begun)["steps"] == 10
    assert results.curve(begun, "val/loss").keys() == {10}
    assert results.saved(begun)["training"]["optimizer"]["param_groups"][0]["lr"] == 0
    for one, other in zip(results.saved(begun)["generators"], results.saved(fresh)["generators"], strict=True):
        assert torch.equal(one["cpu"], other["cpu"])
    worst = shared_run(*WORST)
    for place, pointer in (("best", "best"), ("step_00000050", "last")):
        begun = train(*frozen, f"init_from={worst}/checkpoints/{place}")
        results.assert_same(results.weights(begun), results.weights(worst, pointer))
    resumed = train(f"resume={begun}", "trainer.max_epochs=2")
    assert results.results(resumed)["steps"] == 20


# Checkpoints of earlier versions


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "loss"),
    [("whole", 0.6017349), pytest.param("sharded", 0.6017348, marks=pytest.mark.exhaustive), ("replicas", 0.6927032)],
)
def test_a_run_of_an_earlier_version_resumes(train, tmp_path, name, loss):
    """Runs of 10 steps, written by version 0.1.0 on one process, and by FSDP and local SGD on two.

    loss: of the validation after 20 steps without a stop, by that version.
    """
    if name == "sharded" and torch.__version__ < "2.15":
        pytest.skip("its index was pickled by torch 2.15, and earlier ones can't read that")
    with tarfile.open(Path(__file__).with_name("earlier_checkpoints.tar.xz")) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    earlier = tmp_path / "earlier" / name
    assert results.pointed(earlier, "last") == results.pointed(earlier, "best") == 10
    assert (earlier / "checkpoints" / "last" / "sharded").is_dir() == (name == "sharded")
    weights = results.weights(earlier)
    assert toy_loss(weights, part="val") == pytest.approx(results.curve(earlier, "val/loss")[10], rel=1e-5)
    (earlier / "logs").mkdir()
    train(f"resume={earlier}", "trainer.max_steps=20")
    assert results.curve(earlier, "val/loss")[20] == pytest.approx(loss, rel=1e-4)


LEAVES_OUT = """
import torch
from recipes.toy import ToyModel

class LeavesOut(ToyModel):
    def __init__(self, after):
        super().__init__()
        self.after = after
        self.other = torch.nn.Linear(10, 5)

    def forward(self, x):
        if self.training:
            self.after -= 1
        return super().forward(x) if self.after < 0 else super().forward(x) + self.other(x)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("after", [0, 3])
def test_a_checkpoint_names_parameters_without_a_gradient(train, tmp_path, capfd, after):
    """The next forward, where torch finds it, comes after the checkpoint of the step that left them out."""
    (tmp_path / "own.py").write_text(LEAVES_OUT)
    model = ("~model", f"+model={{_target_:own.LeavesOut,after:{after}}}", "strategy=ddp", "topology.procs_per_node=2")
    train("recipe=toy", *model, "trainer.max_steps=9", "checkpoint.every_n_steps=1", status=2)
    assert "in the step before 2 of 6 had none: other.weight, other.bias." in capfd.readouterr().err
