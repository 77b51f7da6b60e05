"""What needs neither data nor ranks is refused by the command itself: before anything starts, all of it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.internals import (
    compose,
    export_job_module,
    job_module,
    parity_job_module,
    plan_job_module,
    sweep_module,
)
from tests.helpers.trust import trusting


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]


def start(*_: Any, **__: Any) -> None:
    raise AssertionError("ranks or children were started")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in a folder with the module `own`, without a process that could start anything."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_module, "run_ranks", start)
    monkeypatch.setattr(sweep_module, "Sweep", start)
    for module in (plan_job_module, parity_job_module, export_job_module):
        monkeypatch.setattr(module, "call_in_child", start)

    def run(*overrides: str) -> Answer:
        capfd.readouterr()
        status = compose.main(["trainer.gpus=0", *trusting(overrides)])
        assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__", "conf"}
        return Answer(status, *capfd.readouterr())

    return run


TARGETS = {
    "optimizer.lr=abc": "optimizer.lr=abc: must be a number for torch.optim.SGD.",
    "+optimizer.momentun=0.9": "optimizer.momentun: torch.optim.SGD has no such keyword. Did you mean optimizer.mom",
    "+model.width=3": "model.width: recipes.toy.ToyModel has no such keyword.",
    "model._target_=recipes.toy.ToyModl": "there is no ToyModl in recipes.toy. Did you mean recipes.toy.ToyModel?",
    "model._target_=own.Wide": "model.width is required by own.Wide. It takes width.",
    "task.loss._target_=torch.nn.MSELos": "there is no MSELos in torch.nn. Did you mean torch.nn.MSELoss?",
    "+task.loss.reductoin=sum": "Did you mean task.loss.reduction?",
    "+data.datasets.nois=1": "Did you mean data.datasets.noise?",
    "scheduler=step ~scheduler.schedule.step_size": "scheduler.schedule.step_size is required by torch.optim.lr_sched",
    "callbacks=early_stopping ~callbacks.early_stopping.monitor": "callbacks.early_stopping.monitor is required by",
    "+callbacks.mine._target_=own.Mine +callbacks.mine.sped=1": "callbacks.mine.sped: own.Mine has no such keyword. Di",
    "+logger.mine._target_=framework.loggers.JsonlLoger": "Did you mean framework.loggers.JsonlLogger?",
    "strategy=ddp +strategy.static_grap=true": "Did you mean strategy.static_graph?",
}


@pytest.mark.parametrize("overrides", TARGETS)
def test_a_wrong_target_or_keyword(command: Command, overrides: str) -> None:
    answer = command("recipe=toy", *overrides.split())
    assert (answer.status, answer.out) == (2, "")
    assert TARGETS[overrides] in answer.err


def test_mistakes_of_every_kind_come_at_once(command: Command) -> None:
    answer = command("recipe=toy", "optimizer.lr=abc", "+model.width=3", "trainer.limit_val_batches=1.5")
    assert answer.status == 2
    assert answer.err.splitlines()[0] == "The configuration has 3 mistakes:"


@pytest.mark.parametrize(
    "swept",
    [
        "optimizer.lr=0.1,abc",
        "trainer.max_steps=1,x",
        "trainer.max_steps=1,0",
        "trainer.limit_val_batches=1.0,1.5",
        "trainer.precision=32,33",
        "optimizer=sgd,sgdd",
        "task.loss._target_=torch.nn.MSELoss,torch.nn.MSELos",
        "+model={},{width:3}",
        "checkpoint.save_top_k=1,3 checkpoint.monitor=null",
    ],
)
def test_no_job_of_a_sweep_runs_if_one_is_wrong(command: Command, swept: str) -> None:
    answer = command("-m", "recipe=toy", *swept.split())
    assert (answer.status, answer.out) == (2, "")
    assert answer.err


def test_jobs_on_runs_build_nothing(command: Command) -> None:
    assert command("job=runs", "recipe=toy", "optimizer.lr=abc").status == 0


OWN = """
import torch
import framework

class Wide(torch.nn.Module):
    def __init__(self, width):
        super().__init__()

class Mine(framework.Callback):
    def __init__(self, speed=1): ...
    def on_train_step_end(self, info): ...
"""
