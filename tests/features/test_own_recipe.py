"""A recipe in a folder of the user's own: by config alone, or with a small class; and what mistakes in it say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import results
from tests.helpers.source import ROOT

RECIPE = '''
import torch
from pathlib import Path
from torch import distributed, nn
from torch.utils.data import Dataset
from framework import Datasets, StepOutput

_init = distributed.init_process_group

def _noted(*args, **kwargs):
    Path("group_was_made").touch()
    return _init(*args, **kwargs)

distributed.init_process_group = _noted


class Points(Dataset):
    """y = 3x - 1, as mappings."""
    def __init__(self, size): self.x = torch.linspace(-1, 1, size)
    def __len__(self): return len(self.x)
    def __getitem__(self, index):
        x = self.x[index : index + 1]
        return {"input": x, "target": 3 * x - 1}


def points(size=64): return Datasets(train=Points(size), val=Points(32))


class Line(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    def forward(self, x): return self.layers(x)


def near(output, target, /):
    """A metric as a plain function."""
    return ((output - target).abs() < 0.5).sum(), len(target)

def near_metric(): return near


class Huber:
    """A task as a small class."""
    def __init__(self, delta): self.delta = delta
    def training_step(self, model, batch):
        loss = nn.functional.huber_loss(model(batch["input"]), batch["target"], delta=self.delta)
        return StepOutput(loss, len(batch["target"]), {"negative": ((batch["target"] < 0).sum(), len(batch["target"]))})
    def validation_step(self, model, batch):
        off = (model(batch["input"]) - batch["target"]).abs()
        return StepOutput((off**2).mean(), len(off), {"error": (off.sum(), len(off))})
'''
YAML = """# @package _global_
defaults:
  - override /optimizer: adam

model: {_target_: recipes.line.Line, hidden: 16}
data: {datasets: {_target_: recipes.line.points}, batch_size: 8}
task:
  _target_: framework.tasks.Supervised
  loss: {_target_: torch.nn.SmoothL1Loss}
  metrics:
    error: {_target_: framework.tasks.MeanAbsoluteError}
    near: {_target_: recipes.line.near_metric}
trainer: {gpus: 0, max_epochs: 30}
optimizer: {lr: 0.02}
checkpoint: {monitor: val/near, mode: max}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "line.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "line.yaml").write_text(YAML)
    return tmp_path


@pytest.mark.exhaustive
def test_by_config_alone(train, folder):
    run_dir = train("recipe=line")
    assert results.metrics(run_dir).keys() == {"val/loss", "val/error", "val/near"}
    errors = list(results.curve(run_dir, "val/error").values())
    assert errors[-1] < errors[0] / 4
    assert max(results.curve(run_dir, "val/near").values()) > 0.9
    assert results.pointed(run_dir, "best") in results.curve(run_dir, "val/near")


def test_with_a_small_class(train, folder):
    overrides = ("task._target_=recipes.line.Huber", "+task.delta=0.5", "~task.loss", "~task.metrics")
    run_dir = train("recipe=line", *overrides, "checkpoint.monitor=val/error", "checkpoint.mode=min")
    assert results.metrics(run_dir).keys() == {"val/loss", "val/error"}
    errors = list(results.curve(run_dir, "val/error").values())
    assert errors[-1] < errors[0] / 4
    # 64 points of which x < 1/3 are negative, all of them in an epoch of 8 steps; logged every 10 steps.
    negative = results.curve(run_dir, "train/negative")
    assert sum(negative.values()) / len(negative) == pytest.approx(2 / 3, abs=0.05)


# Mistakes


def refused(train, capsys, *overrides):
    train("recipe=line", *overrides, status=2)
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) <= 5
    return printed


def test_mistakes_are_refused_before_the_process_group(train, folder, capsys):
    """They are reported once, not by each rank. tests/unit/test_targets.py has every kind of mistake."""
    printed = refused(train, capsys, "+model.hiden=3", "topology.procs_per_node=2")
    for fact in ("model.hiden", "Did you mean", "hidden"):
        assert fact in printed
    assert printed.count("model.hiden") <= 2
    printed = refused(train, capsys, "model._target_=recipes.lime.Lin", "task.loss._target_=torch.nn.SmoothL1los")
    for fact in ("model._target_=recipes.lime.Lin", "recipes.line", "task.loss._target_", "torch.nn.SmoothL1Loss"):
        assert fact in printed
    printed = refused(train, capsys, "topology.procs_per_node=4", "+data.datasets.size=3")
    assert "3 samples for 4 processes" in printed
    assert not (folder / "group_was_made").exists()
    train("recipe=line", "trainer.max_steps=1")
    assert (folder / "group_was_made").exists()


def test_a_package_that_hides_recipes_is_named(train, folder, capsys):
    (folder / "recipes" / "__init__.py").touch()
    train("recipe=toy", status=2)
    printed = capsys.readouterr().err
    assert f"there is no toy in recipes ({folder}/recipes/__init__.py)" in printed


@pytest.mark.exhaustive
def test_an_own_folder_called_framework_hides_nothing_from_the_command(tmp_path):
    """`framework`, the command; `python -m framework` finds the folder instead, before any code of ours."""
    command = tmp_path / "bin/framework"
    command.parent.mkdir()
    command.write_text("import sys\nfrom framework.__main__ import main\nsys.exit(main())\n")
    own = tmp_path / "own/framework"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    subprocess.run(
        [sys.executable, command, "recipe=toy", "trainer.gpus=0", "trainer.fast_dev_run=true", "data.num_workers=1"],
        cwd=own.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=True,
    )


def test_an_unknown_monitor_names_the_known_metrics(train, folder, capsys):
    printed = refused(train, capsys, "checkpoint.monitor=val/nears")
    assert "checkpoint.monitor=val/nears" in printed
    assert "val/near" in printed.replace("val/nears", "")
