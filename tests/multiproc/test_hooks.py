"""Whatever the user's code does in a hook (it raises, hangs or forks), there is a report, and no process is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

HOOKS = """
import os, time
from contextlib import contextmanager
from pathlib import Path
import torch
from torch.utils.data import Dataset
import framework
from framework import Datasets, StepOutput

def come_to(hook):
    if hook != os.environ["HOOK"] or os.environ["RANK"] != os.environ["HOOK_RANK"]:
        return
    fault = os.environ["FAULT"]
    is_repeated = Path("reached").exists()
    Path("reached").touch()
    if fault == "raise":
        raise ValueError("the fault")
    if is_repeated:
        return
    if fault == "hang":
        time.sleep(600)
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    Path("forked").write_text(str(pid))

class Samples(Dataset):
    def __len__(self):
        come_to("Dataset.__len__")
        return 21
    def __getitem__(self, index):
        come_to("Dataset.__getitem__")
        return torch.full((4,), index / 21), torch.full((1,), index / 21)

class Order:
    def __init__(self, dataset):
        come_to("Sampler.__init__")
    def __len__(self):
        come_to("Sampler.__len__")
        return 21
    def order(self, generator, *, batch_size):
        come_to("Sampler.order")
        return torch.arange(21)

def collate(samples):
    come_to("collate")
    inputs, targets = zip(*samples)
    return torch.stack(inputs), torch.stack(targets)

def samples():
    come_to("datasets")
    return Datasets(Samples(), Samples(), collate_fn=collate)

class Model(torch.nn.Linear):
    def __init__(self):
        come_to("Model.__init__")
        super().__init__(4, 1)
    def forward(self, x):
        come_to("Model.forward")
        return super().forward(x)

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].shape == (1, 4):  # not of the probe that estimates its state
            come_to("Optimizer.step")
        return super().step(closure)

class Metric:
    def __init__(self):
        self.number = 0.0
    def reset(self):
        come_to("Metric.reset")
        self.number = 0.0
    def update(self, values):
        come_to("Metric.update")
        self.number += float(values.sum())
    def state(self):
        come_to("Metric.state")
        return self.number
    def merge(self, state):
        come_to("Metric.merge")
        self.number += state
    def compute(self):
        come_to("Metric.compute")
        return self.number

class Task:
    def __init__(self):
        come_to("Task.__init__")
        self.metrics = {"sum": Metric()}
    def _step(self, model, batch):
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        return StepOutput(loss, len(batch[0]), media=self.media, updates={})
    def media(self):
        come_to("media")
        Path("file").touch()
        return {
            "image": framework.Image(torch.zeros(1, 4, 4)),
            "histogram": framework.Histogram(torch.zeros(4)),
            "table": framework.Table(["a"], [[1]]),
            "text": framework.Text("text"),
            "artifact": framework.Artifact(Path("file")),
        }
    def training_step(self, model, batch):
        come_to("Task.training_step")
        return self._step(model, batch)
    def validation_step(self, model, batch):
        come_to("Task.validation_step")
        return self._step(model, batch)._replace(updates={"sum": (batch[1],)})
    def on_sanity_check_start(self):
        come_to("Task.on_sanity_check_start")
    def on_evaluation_start(self, model, prefix):
        come_to("Task.on_evaluation_start")
    def on_evaluation_end(self):
        come_to("Task.on_evaluation_end")
    def logged(self, interval):
        come_to("Task.logged")
        return {}
    def state_dict(self):
        come_to("Task.state_dict")
        return {}

class Callback:
    def __init__(self):
        come_to("Callback.__init__")
    @contextmanager
    def evaluation_weights(self, model):
        come_to("Callback.evaluation_weights")
        yield
    def state_dict(self):
        come_to("Callback.state_dict")
        return {}
    def load_state_dict(self, state):
        pass

class Logger:
    def __init__(self):
        come_to("Logger.__init__")

def hook(kind, name):
    def called(self, *arguments, **keywords):
        come_to(f"{kind}.{name}")
    return called

for name in (
    "on_fit_start on_train_epoch_start on_before_optimizer_step on_train_step_end on_train_epoch_end "
    "on_validation_start on_validation_end on_fit_end close"
).split():
    setattr(Callback, name, hook("Callback", name))
for name in "start on_train_step_end log flush on_results close".split():
    setattr(Logger, name, hook("Logger", name))
"""
RECIPE = """# @package _global_
model: {_target_: hooks.Model}
data:
  datasets: {_target_: hooks.samples}
  sampler: {_target_: hooks.Order}
  batch_size: 4
  num_workers: 0
task: {_target_: hooks.Task}
optimizer: {_target_: hooks.Optimizer, lr: 0.01}
callbacks: {own: {_target_: hooks.Callback}}
logger: {own: {_target_: hooks.Logger}}
trainer: {max_epochs: 2, log_every_n_steps: 2}
"""
ALL = (
    "datasets",
    "Dataset.__len__",
    "Dataset.__getitem__",
    "collate",
    "Sampler.__init__",
    "Sampler.__len__",
    "Sampler.order",
    "Model.__init__",
    "Model.forward",
    "Optimizer.step",
    "media",
    *(f"Metric.{name}" for name in ("reset", "update", "state", "merge", "compute")),
    "Task.__init__",
    "Task.training_step",
    "Task.validation_step",
    "Task.on_sanity_check_start",
    "Task.on_evaluation_start",
    "Task.on_evaluation_end",
    "Task.logged",
    "Task.state_dict",
    "Callback.__init__",
    "Callback.on_fit_start",
    "Callback.on_train_epoch_start",
    "Callback.on_before_optimizer_step",
    "Callback.on_train_step_end",
    "Callback.on_train_epoch_end",
    "Callback.on_validation_start",
    "Callback.on_validation_end",
    "Callback.on_fit_end",
    "Callback.close",
    "Callback.evaluation_weights",
    "Callback.state_dict",
    "Logger.__init__",
    "Logger.start",
    "Logger.on_train_step_end",
    "Logger.log",
    "Logger.flush",
    "Logger.on_results",
    "Logger.close",
)
SAMPLE = [
    ("Callback.close", "raise"),
    ("Metric.compute", "hang"),
    ("Logger.flush", "fork"),
    ("Optimizer.step", "fork"),
]
# The monitor and the launcher see these from outside, so a few hooks of each part of a run are enough.
FURTHER_HANGS = (
    "datasets",
    "Model.__init__",
    "Task.training_step",
    "Task.on_sanity_check_start",
    "Callback.state_dict",
    "Logger.log",
    "Callback.on_fit_end",
    "Logger.close",
)
FURTHER_FORKS = ("Sampler.order", "Task.on_evaluation_end", "Logger.close")


def further() -> list[tuple[str, str]]:
    """Each hook raises, from a line of the framework's own that calls it; some hang or fork."""
    faults = [(hook, "raise") for hook in ALL]
    faults += [(hook, "hang") for hook in FURTHER_HANGS]
    faults += [(hook, "fork") for hook in FURTHER_FORKS]
    return [fault for fault in faults if fault not in SAMPLE]


EXHAUSTIVE = [pytest.param(*fault, marks=pytest.mark.exhaustive) for fault in further()]


@pytest.mark.parametrize(("hook", "fault"), [*SAMPLE, *EXHAUSTIVE])
def test_a_misbehaving_hook_is_reported_without_leftovers(
    train: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    hook: str,
    fault: str,
) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    recipe = tmp_path / "conf/recipe/hooks.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(RECIPE)
    for name, value in (("HOOK", hook), ("FAULT", fault), ("HOOK_RANK", "0")):
        monkeypatch.setenv(name, value)
    # Only what several ranks hold is merged.
    procs = 2 if hook in ("Metric.state", "Metric.merge") else 1
    times = ("backend.timeout=2s", "backend.init_timeout=5s") if fault == "hang" else ()
    run_dir = train("recipe=hooks", f"topology.procs_per_node={procs}", *times, status=0 if fault == "fork" else 1)
    assert (tmp_path / "reached").exists()
    printed = capfd.readouterr().err
    if fault == "fork":
        pid = int((tmp_path / "forked").read_text())
        assert not psutil.pid_exists(pid)
        assert f"Left behind by the ranks, and ended: pid {pid} (a fork of a rank)" in printed
        return
    first: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
    assert first["rank"] == 0
    if fault == "raise":
        assert "the fault" in first["cause"]
        assert "the fault" in printed
    else:
        assert first["kind"] == "hung"
        assert "come_to at hooks.py:" in printed
