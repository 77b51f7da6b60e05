"""A run that was stopped goes on in its directory and ends as if it had never been stopped."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import cli
from framework.run_dir import RunDir, locked
from tests.helpers import results
from tests.helpers.command import started_framework

SHORT = (
    "recipe=toy",
    "logger=[jsonl,tensorboard]",
    "trainer.max_epochs=2",
    "trainer.limit_test_batches=0",
    "trainer.log_every_n_steps=10",
)
SLEEPER = '''
import time
from pathlib import Path

class Sleeper:
    """Sleeps after a step, the first time it is there: long enough to be interrupted."""
    def __init__(self, after): self.after = after
    def on_train_step_end(self, report):
        if report.step == self.after and not Path("slept").exists():
            Path("slept").touch()
            time.sleep(300)
'''


def copy(run_dir: Path, folder: Path) -> Path:
    """For a test that changes it."""
    return Path(shutil.copytree(run_dir, folder / "outputs" / "toy" / "copy", symlinks=True))


def training(run_dir: Path) -> dict[str, Any]:
    """What of a checkpoint decides how training goes on."""
    state = results.saved(run_dir)
    return {"model": state["model"], "progress": state["training"]["progress"], "generators": state["generators"]}


@pytest.mark.multiproc
@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(train, tmp_path, procs):
    """Ctrl-C twice in the second epoch: after step 131, all up to 130 being logged, the last checkpoint 126."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    every = ("checkpoint.every_n_steps=7", "trainer.log_every_n_steps=2", "trainer.val_check_interval=10", "seed=1")
    processes = (f"topology.procs_per_node={procs}", "data.global_batch_size=20")
    overrides = (*SHORT, *every, *processes, "checkpoint.monitor=null")
    sleeper = ("+callbacks.sleeper._target_=sleeper.Sleeper", "+callbacks.sleeper.after=131")
    command = ("trainer.gpus=0", *overrides, *sleeper)
    with started_framework(*command, cwd=tmp_path) as started:
        deadline = time.monotonic() + 60
        while not (tmp_path / "slept").exists():
            assert started.process.poll() is None, started.printed()
            assert time.monotonic() < deadline, started.printed()
            time.sleep(0.02)
        # Written beside the training.
        while [str(last.readlink()) for last in tmp_path.glob("outputs/*/*/checkpoints/last")] != ["step_00000126"]:
            assert time.monotonic() < deadline, started.printed()
            time.sleep(0.02)
        started.process.send_signal(signal.SIGINT)
        started.wait_for_output("Ctrl-C again ends at once", timeout=10)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=15) == 130
        started.assert_all_gone()
    (stopped,) = tmp_path.glob("outputs/*/*")
    assert results.pointed(stopped, "last") == 126
    assert results.run_file(stopped)["status"] == "interrupted"
    assert max(results.curve(stopped, "train/loss")) == max(results.curve(stopped, "val/loss")) == 130
    assert [event.step for event in results.events(stopped).Scalars("val/loss")][-1] == 130
    resumed = train(f"resume={stopped}")
    whole = train(*overrides)

    one, other = training(whole), training(resumed)
    results.assert_same(other["model"], one["model"])
    assert other["progress"] == one["progress"] == {"epoch": 2, "step": 160, "samples": 0}
    assert len(one["generators"]) == procs
    for mine, wanted in zip(other["generators"], one["generators"], strict=True):
        assert torch.equal(mine["cpu"], wanted["cpu"])
    assert results.curve(resumed, "val/loss") == results.curve(whole, "val/loss")
    losses = results.curve(whole, "train/loss")
    assert results.curve(resumed, "train/loss") == {
        step: pytest.approx(loss, rel=1e-5) for step, loss in losses.items()
    }
    assert results.repeated(resumed) == {}
    for name in ("train/loss", "val/loss"):
        shown = [event.step for event in results.events(resumed).Scalars(name)]
        assert shown == list(results.curve(whole, name))
    record = results.run_file(resumed)
    assert record["status"] == "finished"
    assert [run["status"] for run in record["earlier"]] == ["interrupted"]


@pytest.fixture(scope="module")
def whole_run(train_once):
    return train_once(*SHORT)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("before", "after"), [(2, 3), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in ((1, 2), (2, 1)))]
)
def test_a_run_goes_on_with_another_number_of_processes(train, whole_run, before, after):
    stopped = train(*SHORT, "data.global_batch_size=20", f"topology.procs_per_node={before}", "trainer.max_steps=93")
    resumed = train(f"resume={stopped}", f"topology.procs_per_node={after}", "trainer.max_steps=null")
    assert resumed == stopped
    results.assert_same(results.weights(resumed), results.weights(whole_run), tolerance=1e-6)
    assert f"the checkpoint is of {before} ranks, this run has {after}" in results.log(resumed)
    log = results.log(resumed, rank=after - 1)
    assert f"world size {after}" in log


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=adamw",),
        pytest.param(
            ("optimizer=sgd_momentum", "optimizer.lr=0.001", "trainer.accumulate_grad_batches=3"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=" ".join,
)
def test_optimizers_go_on_with_their_state(train, overrides):
    common = (*SHORT, *overrides)
    whole, stopped = train(*common), train(*common, "trainer.max_steps=33")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(resumed), results.weights(whole))


@pytest.mark.exhaustive
def test_dropout_goes_on_with_its_generators(train):
    limits = ("trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "trainer.limit_test_batches=0")
    common = ("recipe=digits", "logger=none", "scheduler=none", "trainer.max_epochs=2", *limits)
    whole, stopped = train(*common), train(*common, "trainer.max_steps=3")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(resumed), results.weights(whole))


def test_a_run_is_prolonged(train, whole_run):
    prolonged = train(*SHORT, "trainer.max_epochs=1")
    train(f"resume={prolonged}", "trainer.max_epochs=2")
    results.assert_same(results.weights(prolonged), results.weights(whole_run))
    assert results.curve(prolonged, "train/loss") == results.curve(whole_run, "train/loss")
    # What was typed is kept for the next time.
    assert results.pointed(train(f"resume={prolonged}"), "last") == 160


EARLY = ("callbacks=[early_stopping]", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=9")


def test_the_end_that_a_callback_asked_for_counts_unless_what_ends_training_is_changed(train):
    """Killed after the checkpoint of the last step, a run would else train on until its next validation."""
    common = (*SHORT, *EARLY, "trainer.val_check_interval=20", "trainer.max_epochs=4")
    stopped = train(*common)
    steps = results.results(stopped)["steps"]
    assert steps == 40
    curve = results.curve(stopped, "train/loss")
    train(f"resume={stopped}")
    assert results.results(stopped)["steps"] == steps
    assert results.results(stopped)["ended_by"].startswith("EarlyStopping: ")
    assert results.curve(stopped, "train/loss") == curve
    assert results.repeated(stopped) == {}
    train(f"resume={stopped}", "callbacks.early_stopping.patience=3")
    assert results.results(stopped)["steps"] == steps + 40  # two more validations without an improvement


@pytest.mark.parametrize("logged", [True, False])
def test_the_test_of_a_run_that_was_killed_before_its_result_is_logged_once(train, logged):
    run = train("recipe=toy", "logger=[jsonl,tensorboard]", "trainer.max_steps=50", "trainer.limit_test_batches=2")
    wanted, content = results.curve(run, "test/loss"), results.run_file(run)
    del content["results"]
    (run / "run.json").write_text(json.dumps({**content, "status": "running"}))
    if not logged:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(line for line in lines if "test/loss" not in line))
        shutil.rmtree(run / "tensorboard")
    train(f"resume={run}")
    assert results.curve(run, "test/loss") == wanted
    assert [event.step for event in results.events(run).Scalars("test/loss")] == [50]
    assert results.repeated(run) == {}
    assert "test/loss" in results.metrics(run)


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(train, whole_run):
    stopped = train(*SHORT, "checkpoint.enabled=false", "trainer.max_steps=5")
    resumed = train(f"resume={stopped}", "checkpoint.enabled=true", "trainer.max_steps=null")
    assert "There is no checkpoint yet: the run begins anew" in results.log(resumed).splitlines()  # printed, too
    results.assert_same(results.weights(resumed), results.weights(whole_run))
    assert results.repeated(resumed) == {}


# What is refused leaves the run as it was

TWO = (*SHORT, "data.global_batch_size=20", "topology.procs_per_node=2")
SCHEDULED = (*SHORT, "scheduler=step", "scheduler.interval=step", "scheduler.schedule.step_size=40")


@pytest.fixture(scope="module")
def after_one_epoch(train_once):
    """Gives the run of these overrides, which is made once."""
    return functools.cache(lambda *overrides: train_once(*overrides, "trainer.max_epochs=1"))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("overrides", "typed", "reason"),
    [
        (TWO, "optimizer=adam", "can't go on with optimizer torch.optim.Adam"),
        (SHORT, "optimizer=adam", "can't go on with optimizer torch.optim.Adam"),
        (SHORT, "scheduler=cosine", "is of a run with no schedule"),
        (SCHEDULED, "scheduler=none", "can't go on with no schedule"),
        (SCHEDULED, "scheduler=cosine", "with the schedule torch.optim.lr_scheduler.StepLR"),
        (SCHEDULED, "scheduler.schedule.gamma=0.9", "scheduler.schedule.gamma=0.9 (it was 0.1)"),
    ],
)
def test_a_refused_resumption_changes_nothing(train, after_one_epoch, tmp_path, capfd, overrides, typed, reason):
    stopped = copy(after_one_epoch(*overrides), tmp_path)
    files = [stopped / name for name in ("config.yaml", "overrides.yaml")]
    before = [file.read_text() for file in files]
    train(f"resume={stopped}", typed, "trainer.max_epochs=2", status=2)
    printed = capfd.readouterr().err
    assert reason in printed
    assert "init_from" in printed
    assert "Traceback" not in printed
    assert [file.read_text() for file in files] == before
    assert not (stopped / "failure.json").exists()


@pytest.mark.multiproc
def test_after_a_refused_resumption_the_run_goes_on(train, after_one_epoch, tmp_path):
    stopped = copy(after_one_epoch(*TWO), tmp_path)
    train(f"resume={stopped}", "optimizer=adam", "trainer.max_epochs=2", status=2)
    resumed = train(f"resume={stopped}", "trainer.max_epochs=2")
    assert results.results(resumed)["steps"] == 160
    assert results.run_file(resumed)["status"] == "finished"
    assert not (stopped / "failure.json").exists()
    assert not (stopped / "before_resume.yaml").exists()
    assert "max_epochs: 2" in (stopped / "config.yaml").read_text()


def test_another_learning_rate_is_taken_up_in_scale(train):
    """Steps 41 to 80 have a tenth of the rate, those from 81 on a hundredth."""
    common = ("logger=jsonl", "trainer.log_every_n_steps=1", "optimizer.lr=0.01")
    stopped = train(*SCHEDULED, *common, "trainer.max_steps=60")
    resumed = train(f"resume={stopped}", "trainer.max_steps=90", "optimizer.lr=0.02")
    rates = results.curve(resumed, "train/lr")
    assert [rates[step] for step in (60, 61, 80, 81)] == pytest.approx([0.001, 0.002, 0.002, 0.0002])


# Which checkpoint


def test_an_older_checkpoint_is_gone_on_from_where_the_one_that_was_named_is_damaged(train, whole_run, capfd):
    stopped = train(*SHORT, "trainer.max_steps=60", "checkpoint.every_n_steps=20", "checkpoint.save_top_k=-1")
    model = stopped / "checkpoints" / "step_00000060" / "model.pt"
    model.write_bytes(bytes([255]) * model.stat().st_size)
    train(f"resume={model.parent}", "trainer.max_steps=null", status=2)
    assert "step_00000040" in capfd.readouterr().err
    older = stopped / "checkpoints" / "step_00000040"
    train(f"resume={older}", "trainer.max_steps=null")
    assert "Resuming after step 40" in results.log(stopped)
    results.assert_same(results.weights(stopped), results.weights(whole_run))
    assert results.curve(stopped, "train/loss") == results.curve(whole_run, "train/loss")
    assert results.repeated(stopped) == {}
    assert results.pointed(train(f"resume={stopped}"), "last") == 160


def test_an_incomplete_checkpoint_is_refused_before_anything_is_changed(train, whole_run, capfd):
    before = (whole_run / "run.json").read_text()
    (whole_run / "checkpoints" / "step_00000001").mkdir()
    try:
        train(f"resume={whole_run}/checkpoints/step_00000001", status=2)
    finally:
        (whole_run / "checkpoints" / "step_00000001").rmdir()
    assert "is not complete" in capfd.readouterr().err
    assert (whole_run / "run.json").read_text() == before


def test_weights_to_begin_with_are_looked_for_before_a_run_is_made(warm, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SHORT, "trainer.gpus=0", f"init_from={tmp_path}/nowhere"], warm=warm) == 2
    assert "There is no " in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_in_use_is_refused(train, whole_run, warm, capfd):
    with locked(RunDir(whole_run)):
        before = (whole_run / "run.json").read_text()
        train(f"resume={whole_run}", "trainer.max_epochs=3", status=2)
        assert (whole_run / "run.json").read_text() == before
    assert "in use by another process" in capfd.readouterr().err


def test_the_limit_that_ended_a_run_is_named(train):
    prolonged = train(*SHORT, "trainer.max_steps=100")
    assert results.results(prolonged)["ended_by"] == "trainer.max_steps reached"
    train(f"resume={prolonged}", "trainer.max_epochs=1", "trainer.max_steps=null")
    assert results.results(prolonged)["ended_by"] == "trainer.max_epochs reached"
