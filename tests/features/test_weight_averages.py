"""Averages of the weights: their format, equal weights (SWA) and BatchNorm's statistics, through the command."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from framework.checkpoint import LocalStorage, find
from tests.helpers import results
from tests.helpers.internals import seed_everything, write_checkpoint

NORMED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from framework import Datasets

class Normed(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

def drifting(size=100, **_):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0)) + torch.arange(size)[:, None] / 8
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    return Datasets(train=data, val=data)
"""
DATA = ("data.datasets._target_=normed.drifting", "data.batch_size=8", "data.shuffle=false")
SWA = (
    "recipe=toy",
    "logger=jsonl",
    "model._target_=normed.Normed",
    *DATA,
    "optimizer.lr=0.01",
    "trainer.max_epochs=5",
    "trainer.log_every_n_steps=1",
    "callbacks=swa",
    "callbacks.swa.swa_epoch_start=2",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "normed.py").write_text(NORMED)
    return tmp_path


def samples() -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)) + torch.arange(100)[:, None] / 8
    return list(zip(inputs.split(8), inputs.sum(dim=1, keepdim=True).split(8), strict=True))


def plain_swa(lrs: dict[int, float] | None = None) -> AveragedModel:
    """Five epochs as torch's documentation writes them. lrs: epoch → learning rate."""
    seed_everything(0, rank=0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(5):
        for inputs, targets in samples():
            optimizer.param_groups[0]["lr"] = (lrs or {}).get(epoch, 0.01)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch >= 2:
            averaged.update_parameters(model)
    update_bn(samples(), averaged)
    return averaged


@pytest.mark.usefixtures("own_state")
def test_swa_is_that_of_torch_with_its_batchnorm(train, folder):
    run = train(*SWA)
    averaged = plain_swa().module
    results.assert_same(results.saved(run)["model"], averaged.state_dict(), tolerance=1e-5)
    averaged.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(averaged(x), y).item() * len(x) for x, y in samples()]
    assert results.metrics(run)["val/loss"] == pytest.approx(sum(losses) / 100, rel=1e-4)


@pytest.mark.usefixtures("own_state")
def test_swa_anneals_to_its_own_learning_rate(train, folder):
    own = ("callbacks.swa.swa_lrs=0.001", "callbacks.swa.annealing_epochs=2")
    # The run stops in the middle of the fourth epoch.
    first = train(*SWA, *own, "trainer.max_steps=41")
    run = train(f"resume={first}", "trainer.max_steps=null")
    share = (1 - math.cos(math.pi / 2)) / 2
    lrs = {3: 0.001 * share + 0.01 * (1 - share), 4: 0.001}
    logged = results.curve(run, "train/lr")
    assert {epoch: logged[epoch * 13 + 5] for epoch in range(5)} == pytest.approx({0: 0.01, 1: 0.01, 2: 0.01, **lrs})
    results.assert_same(results.saved(run)["model"], plain_swa(lrs).module.state_dict(), tolerance=1e-5)


@pytest.mark.multiproc
def test_swa_on_two_processes_saves_what_it_validates(train, folder):
    two = (*SWA, "trainer.max_epochs=4", "topology.procs_per_node=2")
    run = train(*two)
    again = train("job=eval", f"checkpoint.path={run}", "eval.part=val", "topology.procs_per_node=1")
    assert results.metrics(again)["val/loss"] == pytest.approx(results.metrics(run)["val/loss"], rel=1e-5)
    normalised = results.saved(run)["model"]["1.num_batches_tracked"]
    assert normalised == 14, "batches of both ranks"
    resumed = train(f"resume={train(*two, 'trainer.max_steps=17')}", "trainer.max_steps=null")
    results.assert_same(results.saved(resumed)["model"], results.saved(run)["model"])


TASKS = """
import torch
from torch import nn
from framework.tasks import Supervised

class Spread(nn.Sequential):
    # Takes a single sample, which BatchNorm1d(4) would refuse.
    def __init__(self): super().__init__(nn.Unflatten(1, (1, 4)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(4, 1))

class Gathers(Supervised):
    def training_step(self, model, batch, info):
        x, y = batch
        assert len(info.gather(y)) == info.global_count
        return super().training_step(model, batch)

class Carries(Supervised):
    slot_state = {"steps": 0}
    steps = None

    def training_step(self, model, batch):
        before = torch.zeros(len(batch[0])) if self.steps is None else self.steps
        self.steps = before + 1
        return super().training_step(model, batch)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize(("task", "size"), [("Gathers", 49), ("Carries", 48)])
def test_the_pass_for_batchnorm_is_as_in_training(train, folder, task, size):
    """The last of 49 samples comes alone: one of two processes has a stand-in."""
    (folder / "tasks.py").write_text(TASKS)
    own = ("model._target_=tasks.Spread", f"+data.datasets.size={size}")
    common = (*SWA, *own, "data.global_batch_size=8", "topology.procs_per_node=2", "trainer.max_epochs=4")
    run = train(*common, f"task._target_=tasks.{task}")
    results.assert_same(results.weights(run), results.weights(train(*common)))
    if task == "Carries":
        assert results.saved(run)["training"]["slots"]["steps"].tolist() == [24.0] * 8


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("callbacks.swa.swa_epoch_start=5", "never comes: training has 5 epochs"),
        ("callbacks.swa.swa_epoch_start=1.5", "swa_epoch_start=1.5 is neither"),
        ("callbacks.swa.swa_lrs=[0.1,0.2]", "swa_lrs has 2 rates, and the optimizer has 1"),
        ("callbacks.swa.annealing_strategy=step", "Use one of: cos, linear"),
    ],
)
def test_wrong_settings_of_swa_are_refused(train, folder, capsys, typed, named):
    train(*SWA, typed, status=2)
    assert named in capsys.readouterr().err


BF16 = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.precision=bf16-true",
    "trainer.limit_train_batches=20",
    "trainer.max_epochs=3",
)


@pytest.mark.parametrize("callback", [("callbacks=ema", "callbacks.ema.decay=0.99"), ("callbacks=swa",)])
def test_averages_of_bfloat16_weights_are_float32(train, tmp_path, callback):
    (tmp_path / "noted.py").write_text(NOTED)
    noted = ("+callbacks.noted._target_=noted.Noted",)
    run = train(*BF16, *callback, *noted)
    trained = torch.load(tmp_path / "noted.pt", weights_only=True)
    name = callback[0].partition("=")[2]
    average = results.saved(run)["training"]["callbacks"][name]["average"]
    expected = mean_of(trained, is_ema=name == "ema")
    for key, tensor in average.items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)
    model = results.saved(run)["model"]
    results.assert_same(model, {key: tensor.bfloat16() for key, tensor in average.items()})
    again = train("job=eval", f"checkpoint.path={run}", "eval.part=val")
    assert results.metrics(again)["val/loss"] == results.metrics(run)["val/loss"]
    resumed = train(f"resume={train(*BF16, *callback, *noted, 'trainer.max_steps=27')}", "trainer.max_steps=null")
    assert results.saved(resumed)["training"]["callbacks"][name].keys() >= {"average"}
    results.assert_same(results.saved(resumed)["training"]["callbacks"][name]["average"], average)
    results.assert_same(results.saved(resumed)["training"]["model"], results.saved(run)["training"]["model"])


NOTED = """
import torch

class Noted:
    \"\"\"Writes the weights after each step.\"\"\"
    def on_fit_start(self, info): self.model, self.noted = info.model, []
    def on_train_step_end(self, report):
        self.noted.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
    def on_fit_end(self): torch.save(self.noted, "noted.pt")
"""


def mean_of(trained: list[dict[str, Tensor]], *, is_ema: bool) -> dict[str, Tensor]:
    """The average in double precision. SWA begins at 0.8 of 3 epochs: the last one."""
    average: dict[str, Any] = {}
    for weights in trained if is_ema else [trained[-1]]:
        for name, tensor in weights.items():
            value = tensor.double()
            average[name] = 0.99 * average[name] + 0.01 * value if name in average else value
    return {name: tensor.float() for name, tensor in average.items()}


def test_an_average_saved_in_bfloat16_is_loaded(train):
    run = train(*BF16, "callbacks=ema", "trainer.max_steps=10")
    state = results.saved(run)
    ema = state["training"]["callbacks"]["ema"]
    ema["average"] = {name: tensor.bfloat16() for name, tensor in ema["average"].items()}
    place = find(run / "checkpoints" / "last")
    config_text = (place / "config.yaml").read_text()
    shutil.rmtree(place)
    write_checkpoint(LocalStorage(run / "checkpoints"), state, step=10, epoch=0, metrics={}, config_text=config_text)
    resumed = train(f"resume={run}", "trainer.max_steps=30")
    average = results.saved(resumed)["training"]["callbacks"]["ema"]["average"]
    assert {tensor.dtype for tensor in average.values()} == {torch.float32}
    assert results.results(resumed)["steps"] == 30
