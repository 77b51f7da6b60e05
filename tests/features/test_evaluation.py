"""What is logged and evaluated is of all ranks' samples, each once, however many ranks there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipes.toy import ToyModel, toy_regression
from tests.helpers import results

pytestmark = pytest.mark.multiproc

METRIC = "+task.metrics.error._target_=framework.tasks.MeanAbsoluteError"
SHORT = ("recipe=toy", "logger=[jsonl,tensorboard]", METRIC)
FROZEN = ("trainer.max_steps=1", "trainer.val_check_interval=1", "optimizer.lr=0")


TRAINED = (*SHORT, "trainer.max_epochs=2", "trainer.log_every_n_steps=10")


@pytest.fixture
def trained(shared_run):
    return shared_run(*TRAINED)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.exhaustive),
        # 200 samples can't be split evenly over 3: 67, 67 and 66, in batches of 7.
        ("topology.procs_per_node=3", "data.eval_batch_size=7", "data.num_workers=1"),
    ],
    ids=["1", "3"],
)
def test_metrics_are_those_of_the_whole_part(train, trained, overrides):
    found = results.metrics(train(*SHORT, *FROZEN, *overrides, f"init_from={trained}"))
    model = ToyModel()
    model.load_state_dict(results.weights(trained))
    data: Any = toy_regression()
    for part, dataset in (("val", data.val), ("test", data.test)):
        inputs, targets = dataset.tensors
        with torch.no_grad():
            off = model(inputs) - targets
        assert found[f"{part}/loss"] == pytest.approx(float((off**2).mean()), rel=1e-6)
        assert found[f"{part}/error"] == pytest.approx(float(off.abs().mean()), rel=1e-6)


def test_the_logged_curves_are_of_all_ranks(train, trained):
    """The same global batches over two processes, of a last one that is short: the same curves."""
    many = train(*TRAINED, "topology.procs_per_node=2", "data.global_batch_size=20")
    for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/error"):
        one = results.curve(trained, name)
        assert results.curve(many, name) == {step: pytest.approx(value, rel=1e-4) for step, value in one.items()}, name


DIFFERING = '''
import os
import torch
from framework import StepOutput

class Differing:
    """One rank has another metric from one step on."""
    def __init__(self, since): self.since, self.steps = since, 0
    def training_step(self, model, batch):
        self.steps += 1
        output = self.validation_step(model, batch)
        name = "odd" if os.environ["RANK"] == "1" and self.steps >= self.since else "even"
        return output._replace(metrics={"even": (1.0, 1), name: (1.0, 1)})
    def validation_step(self, model, batch):
        return StepOutput(torch.nn.functional.mse_loss(model(batch[0]), batch[1]), len(batch[0]))
'''


@pytest.mark.parametrize(
    ("since", "message"),
    [
        (1, "Rank 0 reports the metrics ['even', 'loss'], but other ranks or earlier reports ['even', 'loss', 'odd']."),
        (4, "Rank 1 reports the metrics ['even', 'loss', 'odd'], but other ranks or earlier reports ['even', 'loss']."),
    ],
)
def test_ranks_that_log_different_keys_are_named(train, tmp_path, capfd, since, message):
    """All ranks report it in the first log; later only the rank that differs, and no other rank waits for it."""
    (tmp_path / "differing.py").write_text(DIFFERING)
    task = ("~task.loss", "~task.metrics", "task._target_=differing.Differing", f"+task.since={since}")
    steps = ("trainer.log_every_n_steps=3", "trainer.max_steps=9", "backend.timeout=60s")
    train("recipe=toy", "logger=jsonl", *steps, *task, "topology.procs_per_node=2", status=1)
    printed = capfd.readouterr().err
    assert printed.count(message) == 1, printed
    assert "Traceback" not in printed
    assert "A task must return the same names on every rank and for every batch." in printed
    if since > 3:
        assert "Rank 1 of 2" in printed
        assert "rank 0" in printed.partition("others")[2].splitlines()[0]


def test_tensorboard_has_what_metrics_jsonl_has(trained):
    events = results.events(trained)
    names = {name for name in results.logged_names(trained) if "/" in name}
    # The best value is logged for the table of hyperparameters.
    assert set(events.Tags()["scalars"]) == names | {"val/loss/best"}
    for name in names:
        points = {event.step: event.value for event in events.Scalars(name)}
        assert points == {step: pytest.approx(value, rel=1e-6) for step, value in results.curve(trained, name).items()}


NORMED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from framework import Datasets

class Normed(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

def drifting(size=96, **_):
    # Ranks see different statistics.
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0)) + torch.arange(size)[:, None] / 8
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    return Datasets(train=data, val=data)
"""


def test_validation_uses_the_weights_that_are_saved(train, tmp_path):
    (tmp_path / "normed.py").write_text(NORMED)
    data = ("data.datasets._target_=normed.drifting", "data.batch_size=8", "data.shuffle=false")
    own = ("recipe=toy", "logger=none", "model._target_=normed.Normed", *data, "trainer.max_epochs=2")
    run = train(*own, "topology.procs_per_node=2", "callbacks=ema", "callbacks.ema.decay=0.5")
    again = train("job=eval", f"checkpoint.path={run}", "eval.part=val", "topology.procs_per_node=1")
    assert results.metrics(again)["val/loss"] == pytest.approx(results.metrics(run)["val/loss"], rel=1e-5)


TABLES = """
import torch
from framework import StepOutput
from recipes.toy import ToyModel

SHARED = {}

class Cached(ToyModel):
    # Keeps a row for each sample of the largest batch so far, as models do for positions, in itself and in its module.
    table = torch.ones(0, 1)
    def forward(self, x):
        if len(self.table) < len(x):
            self.table = SHARED["table"] = 1 + torch.arange(len(x))[:, None] / 100
        return super().forward(x) * self.table[: len(x)] * SHARED["table"][: len(x)]

class Forces:
    # Validates by the gradient of the energy, with torch.autograd.grad or with backward.
    def __init__(self, calls_backward): self.calls_backward = calls_backward
    def training_step(self, model, batch):
        return StepOutput((model(batch[0]) - batch[1]).square().mean(), len(batch[0]))
    def validation_step(self, model, batch):
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            energy = model(x).square().sum()
            if self.calls_backward:
                energy.backward()
                force = x.grad
            else:
                (force,) = torch.autograd.grad(energy, x)
        count = len(x)
        return StepOutput(energy / count, count, {"force": (force.abs().sum(), count)})
    def predict_step(self, model, batch):
        return self.validation_step(model, batch).loss.expand(len(batch[0]))
"""


def test_training_uses_what_evaluations_cache(train, tmp_path):
    """Validation batches grow the tables that a model caches; forces in evaluation leave no gradients behind."""
    (tmp_path / "tables.py").write_text(TABLES)
    task = ("~task", "+task._target_=tables.Forces")
    parts = ("recipe=toy", "logger=jsonl", "model._target_=tables.Cached", *task)
    steps = ("trainer.max_steps=6", "trainer.check_val_every_n_epoch=null", "data.eval_batch_size=50")
    often = (*parts, *steps, "trainer.val_check_interval=2", "trainer.limit_val_batches=2")
    validated = train(*often, "+task.calls_backward=true")
    never = train(*parts, *steps, "checkpoint.monitor=null", "+task.calls_backward=false")
    results.assert_same(results.weights(validated), results.weights(never))
    assert list(results.curve(validated, "val/force")) == [2, 4, 6]
    assert results.metrics(never)["test/force"] > 0
    train("job=predict", f"checkpoint.path={never}", "predict.output=energies.pt")
    assert len(torch.load(tmp_path / "energies.pt")["output"]) == 200


NO_GRADIENTS = """
import torch
from framework.tasks import Supervised

class Forces(Supervised):
    def validation_step(self, model, batch):
        x = batch[0].clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
"""


def test_missing_gradients_in_evaluation_have_advice(train, tmp_path, capfd):
    (tmp_path / "forces.py").write_text(NO_GRADIENTS)
    train("recipe=toy", "logger=none", "task._target_=forces.Forces", status=1)
    words = " ".join(capfd.readouterr().err.split())
    assert "try Evaluations run without gradients." in words
    assert "`with torch.enable_grad():` in the task's validation_step" in words
