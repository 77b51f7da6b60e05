"""How long a resumed run is, on another number of processes or with another batch size, and what its schedule does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.internals import (
    BatchPlan,
    EpochSizes,
    EpochSteps,
    GlobalOrder,
    Start,
    TrainerConfig,
    epoch_indices,
    start_of,
    total_steps,
    windows,
)

LENGTH = """
class Length:
    def on_fit_start(self, info): print("length", info.start_step, info.total_steps, info.steps_left_in_epoch)
"""
# 40 steps an epoch on one process, 20 on two.
RUN = (
    "recipe=toy",
    "logger=jsonl",
    "data.datasets.num_samples=1000",
    "trainer.limit_test_batches=0",
    "trainer.log_every_n_steps=1",
    "+callbacks.length._target_=length.Length",
    "scheduler=cosine",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "length.py").write_text(LENGTH)
    return tmp_path


def lengths_of(run: Path) -> list[str]:
    return re.findall(r"^length .*$", results.log(run), flags=re.M)


@pytest.mark.multiproc
def test_a_run_resumes_with_another_world_size(train, capfd):
    run = train(*RUN, "trainer.max_epochs=3", "trainer.max_steps=50", "scheduler.total_steps=120")
    per_epoch = results.results(run)["steps"] - 10
    assert per_epoch == 40
    more = (f"resume={run}", "trainer.max_steps=null", "topology.procs_per_node=2")
    capfd.readouterr()
    train(*more, "scheduler.total_steps=null", status=2)
    printed = capfd.readouterr().err
    # 10 of 40 steps of the second epoch are done: 600 samples are left, then 20 steps.
    assert "was made for 120 steps, and this run has 85. To resume" in printed
    resumed = train(*more, "scheduler.total_steps=85")
    assert lengths_of(resumed)[-1] == "length 50 85 15"
    assert results.results(resumed)["steps"] == 85
    assert "A global batch has 40 samples now, and had 20" in results.log(resumed)
    rates = results.curve(resumed, "train/lr")
    assert rates[85] < rates[50]
    assert rates[85] > 0


def test_a_finished_run_extends_with_larger_batches(train, capfd):
    run = train(*RUN, "trainer.max_epochs=1")
    more = (f"resume={run}", "trainer.max_epochs=2", "data.batch_size=40")
    train(*more, status=2)
    printed = capfd.readouterr().err
    assert "was made for 40 steps, and this run has 60" in printed
    assert "keeps the schedule" not in printed, "it is over"
    assert "scheduler.total_steps=60 stretches it" in printed
    train(*more, "scheduler.total_steps=40", status=2)
    assert "The learning-rate schedule is over: it has 40 steps, and this run continues after 40" in (
        printed := capfd.readouterr().err
    )
    assert "scheduler.total_steps=60 stretches it" in printed
    resumed = train(*more, "scheduler.total_steps=60")
    assert results.results(resumed)["steps"] == 60
    assert lengths_of(resumed)[-1] == "length 40 60 None"


def test_a_schedule_shorter_than_the_run_is_reported(train, capfd):
    run = train(*RUN, "trainer.max_epochs=1", "trainer.max_steps=30", "scheduler.total_steps=40")
    train(f"resume={run}", "trainer.max_steps=null", "trainer.max_epochs=2", "scheduler.total_steps=null", status=2)
    assert "scheduler.total_steps=40 keeps the schedule as it was; the last 40 steps have its last" in (
        capfd.readouterr().err
    )
    resumed = train(f"resume={run}", "trainer.max_steps=50", "trainer.max_epochs=2", "scheduler.total_steps=40")
    assert "ends after 40 steps, and the run after 50: the last 10 have" in results.log(resumed)
    assert results.results(resumed)["steps"] == 50


def test_a_planned_tail_is_resumed(train):
    own = (*RUN, "trainer.max_epochs=1", "scheduler.total_steps=20", "scheduler.schedule.min_factor=0.5")
    whole = train(*own)
    # It was stopped after the schedule's end, as by a signal: the limit isn't part of the plan.
    stopped = train(*own, "+callbacks.stop._target_=length.Length", "trainer.max_steps=30")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.saved(resumed)["model"], results.saved(whole)["model"])


def test_schedule_epochs_count_those_done_and_left(train, capfd):
    by_epoch = ("scheduler.interval=epoch", "trainer.max_epochs=4")
    run = train(*RUN, *by_epoch, "trainer.max_steps=50", "scheduler.total_steps=4")
    resumed = train(f"resume={run}", "trainer.max_steps=null", "scheduler.total_steps=null", "data.batch_size=40")
    assert results.results(resumed)["steps"] == 50 + 15 + 40
    assert "made for" not in capfd.readouterr().err


def made(size: int, plan: BatchPlan, *, epoch: int, samples: int, limit: int | None) -> int:
    order = GlobalOrder(size, 0, False)
    return len(list(windows(epoch_indices(order, plan, epoch=epoch, start=samples, limit=limit), plan, rank=0)))


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A dataset, how it is cut, and where training continues."""

    size: int = 100
    batch: int = 8
    limit: int | None = None
    progress: dict[str, int]
    epochs: int


@pytest.mark.parametrize(
    "resumed",
    [
        Resumed(progress={"epoch": 1, "step": 30, "samples": 33}, epochs=3),
        Resumed(limit=5, progress={"epoch": 1, "step": 30, "samples": 33}, epochs=3),
        Resumed(progress={"epoch": 2, "step": 30, "samples": 0}, epochs=5),
        Resumed(batch=7, limit=14, progress={"epoch": 0, "step": 3, "samples": 96}, epochs=1),
        Resumed(size=5, progress={"epoch": 2, "step": 4, "samples": 4}, epochs=2),
        Resumed(size=5, progress={"epoch": 0, "step": 1, "samples": 4}, epochs=2),
    ],
)
def test_total_steps_are_those_the_loader_yields(resumed: Resumed) -> None:
    plan = BatchPlan(resumed.batch, 1, world_size=1)
    steps = EpochSteps(EpochSizes(resumed.size), plan, resumed.limit)
    start = start_of(resumed.progress, steps=steps, plan=plan)
    settings: Any = TrainerConfig.__new__(TrainerConfig)
    object.__setattr__(settings, "max_epochs", resumed.epochs)
    object.__setattr__(settings, "max_steps", None)
    left = 0
    for epoch in range(resumed.progress["epoch"], resumed.epochs):
        samples = resumed.progress["samples"] if epoch == resumed.progress["epoch"] else 0
        left += made(resumed.size, plan, epoch=epoch, samples=samples, limit=resumed.limit)
    assert total_steps(settings, steps=steps, start=start) == resumed.progress["step"] + left
    assert total_steps(settings, steps=None, start=Start(1, 30)) is None
