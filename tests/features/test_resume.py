"""A run that was stopped or killed resumes in its directory and ends like the uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.helpers import exact, results
from tests.helpers.internals import RunDir, locked
from tests.helpers.stopping import OVERRIDES, PAUSE, paused_training

SHORT = (
    "recipe=toy",
    "logger=[jsonl,tensorboard]",
    "trainer.max_epochs=2",
    "trainer.limit_test_batches=0",
    "trainer.log_every_n_steps=10",
)


@pytest.fixture
def whole_run(shared_run):
    return shared_run(*SHORT)


def copy(run_dir: Path, folder: Path) -> Path:
    """For a test that changes it."""
    return Path(shutil.copytree(run_dir, folder / "outputs" / "toy" / "copy", symlinks=True))


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_a_killed_run_resumes_exactly(train, tmp_path):
    """The kill comes after step 131, when all up to 130 is logged. No process can end in order."""
    overrides = ("checkpoint.every_n_steps=7", "trainer.log_every_n_steps=2", "trainer.val_check_interval=10")
    with paused_training(tmp_path, *overrides, procs=2) as started:
        os.killpg(started.process.pid, signal.SIGKILL)
        assert started.wait(timeout=30) == -signal.SIGKILL
        started.assert_all_gone()
    (killed,) = tmp_path.glob("outputs/*/*")
    assert results.run_file(killed)["status"] == "running"
    # The checkpoint that was being written when the run was killed may be lost.
    assert results.pointed(killed, "last") in (119, 126)
    (tmp_path / "go").touch()
    whole = train(*OVERRIDES, *overrides, "topology.procs_per_node=2", *PAUSE)
    resumed = train(f"resume={killed}")
    assert resumed == killed
    assert exact.differences(whole, resumed) == []
    assert results.repeated(resumed) == {}
    record = results.run_file(resumed)
    assert record["status"] == "finished"
    assert [run["status"] for run in record["earlier"]] == ["running"]


def test_a_finished_run_is_extended_and_stays_so(train, whole_run):
    prolonged = train(*SHORT, "trainer.max_epochs=1")
    train(f"resume={prolonged}", "trainer.max_epochs=2")
    results.assert_same(results.weights(prolonged), results.weights(whole_run))
    assert results.curve(prolonged, "train/loss") == results.curve(whole_run, "train/loss")
    assert results.results(prolonged)["ended_by"] == "trainer.max_epochs reached"
    assert results.pointed(train(f"resume={prolonged}"), "last") == 160


EARLY = ("callbacks=[early_stopping]", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=9")


def test_a_callbacks_stop_holds_unless_limits_change(train):
    """Killed after the checkpoint of the last step, a run would else train on until its next validation."""
    common = (*SHORT, *EARLY, "trainer.val_check_interval=20", "trainer.max_epochs=4")
    stopped = train(*common)
    curve = results.curve(stopped, "train/loss")
    assert results.results(stopped)["steps"] == 40
    train(f"resume={stopped}")
    assert results.results(stopped)["steps"] == 40
    assert results.results(stopped)["ended_by"].startswith("EarlyStopping: ")
    assert results.curve(stopped, "train/loss") == curve
    train(f"resume={stopped}", "callbacks.early_stopping.patience=3")
    # There were two more validations without an improvement.
    assert results.results(stopped)["steps"] == 80


def test_a_killed_runs_test_is_logged_once(train, shared_run, tmp_path):
    tested = ("recipe=toy", "logger=[jsonl,tensorboard]", "trainer.max_steps=50", "trainer.limit_test_batches=2")
    run = copy(shared_run(*tested), tmp_path)
    wanted = results.curve(run, "test/loss")
    content = results.run_file(run)
    del content["results"]
    (run / "run.json").write_text(json.dumps({**content, "status": "running"}))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if "test/loss" not in line))
    shutil.rmtree(run / "logs")
    for file in run.glob("events.out.tfevents.*"):
        file.unlink()
    train(f"resume={run}")
    assert results.curve(run, "test/loss") == wanted
    assert [event.step for event in results.events(run).Scalars("test/loss")] == [50]
    assert results.repeated(run) == {}
    assert "test/loss" in results.metrics(run)


def test_a_finished_run_resumed_from_an_older_checkpoint_has_its_test_again(train):
    """The row that was logged is removed, being of a later step."""
    settings = ("trainer.max_steps=40", "trainer.limit_test_batches=2", "checkpoint.every_n_steps=20")
    run = train("recipe=toy", "logger=jsonl", *settings, "checkpoint.save_top_k=-1")
    wanted = results.curve(run, "test/loss")
    assert list(wanted) == [40]
    train(f"resume={run / 'checkpoints' / 'step_00000020'}")
    assert results.curve(run, "test/loss") == wanted
    train(f"resume={run}")
    assert results.curve(run, "test/loss") == wanted
    assert results.repeated(run) == {}


def test_without_a_checkpoint_a_run_restarts(train, whole_run):
    stopped = train(*SHORT, "checkpoint.enabled=false", "trainer.max_steps=5")
    resumed = train(f"resume={stopped}", "checkpoint.enabled=true", "trainer.max_steps=null")
    assert "There is no checkpoint yet" in results.log(resumed)
    results.assert_same(results.weights(resumed), results.weights(whole_run))
    assert results.repeated(resumed) == {}


SCHEDULED = (*SHORT, "scheduler=step", "scheduler.interval=step", "scheduler.schedule.step_size=40")


def test_another_learning_rate_is_scaled_by_the_schedule(train):
    """Steps 41 to 80 have a tenth of the rate, those from 81 on a hundredth."""
    common = ("logger=jsonl", "trainer.log_every_n_steps=1", "optimizer.lr=0.01")
    stopped = train(*SCHEDULED, *common, "trainer.max_steps=60")
    resumed = train(f"resume={stopped}", "trainer.max_steps=90", "optimizer.lr=0.02")
    rates = results.curve(resumed, "train/lr")
    assert [rates[step] for step in (60, 61, 80, 81)] == pytest.approx([0.001, 0.002, 0.002, 0.0002])


@pytest.mark.exhaustive
def test_a_run_resumes_from_an_older_checkpoint(train, whole_run, tmp_path):
    """A restart before its first checkpoint doesn't take the later one that was left out on purpose."""
    stopped = train(*SHORT, "trainer.max_steps=60", "checkpoint.every_n_steps=20", "checkpoint.save_top_k=-1")
    older = stopped / "checkpoints" / "step_00000040"
    (tmp_path / "fail.py").write_text(
        "class Failing:\n    def on_train_step_end(self, report): raise ValueError('no more')\n"
    )
    fail = ("+callbacks.fail._target_=fail.Failing", "trainer.max_steps=null")
    train(f"resume={older}", *fail, status=1)
    assert results.pointed(stopped, "last") == 40
    train(f"resume={stopped}", "~callbacks.fail")
    assert results.log(stopped).count("Resuming after step 40") >= 2
    results.assert_same(results.weights(stopped), results.weights(whole_run))
    assert results.curve(stopped, "train/loss") == results.curve(whole_run, "train/loss")
    assert results.repeated(stopped) == {}


# What is refused leaves the run as it was


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("overrides", "typed", "reason"),
    [
        pytest.param(
            (*SHORT, "topology.procs_per_node=2"),
            "optimizer=adam",
            "optimizer torch.optim.Adam",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(SHORT, "scheduler=cosine", "no schedule", marks=pytest.mark.exhaustive),
        (SCHEDULED, "scheduler.schedule.gamma=0.9", "scheduler.schedule.gamma=0.9 (it was 0.1)"),
    ],
)
def test_a_refused_resume_changes_nothing(train, shared_run, tmp_path, capfd, overrides, typed, reason):
    stopped = copy(shared_run(*overrides, "trainer.max_epochs=1"), tmp_path)
    records = [stopped / name for name in ("config.yaml", "overrides.yaml", "run.json", "metrics.jsonl")]
    before = [file.read_text() for file in records]
    train(f"resume={stopped}", typed, "trainer.max_epochs=2", status=2)
    printed = capfd.readouterr().err
    assert reason in printed
    assert "init_from" in printed
    assert "Traceback" not in printed
    assert [file.read_text() for file in records] == before
    assert not (stopped / "failure.json").exists()
    if overrides == SCHEDULED:
        resumed = train(f"resume={stopped}", "trainer.max_steps=90", "trainer.max_epochs=2")
        assert results.results(resumed)["steps"] == 90
        assert results.run_file(resumed)["status"] == "finished"
        assert "max_steps: 90" in (stopped / "config.yaml").read_text()


def test_unusable_checkpoints_and_busy_runs_are_refused(train, shared_run, tmp_path, capfd):
    run = copy(shared_run(*SHORT), tmp_path)
    before = (run / "run.json").read_text()
    (run / "checkpoints" / "step_00000001").mkdir()
    train(f"resume={run}/checkpoints/step_00000001", status=2)
    assert "it has no manifest.json" in capfd.readouterr().err
    with locked(RunDir(run)):
        train(f"resume={run}", "trainer.max_epochs=3", status=2)
    assert "in use by another process" in capfd.readouterr().err
    assert (run / "run.json").read_text() == before
    train(*SHORT, f"init_from={tmp_path}/nowhere", status=2)
    assert "There is no " in capfd.readouterr().err
