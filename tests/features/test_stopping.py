"""A request to stop, by a signal: the run stops after a step, saves it, and goes on later as if never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from framework.engine import run_rank
from framework.errors import EXIT_STOPPED
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.pulse import Pulse
from framework.topology import Topology
from tests.helpers import results
from tests.helpers.command import run_framework
from tests.helpers.stopping import OVERRIDES, PAUSED_AT, go_on, paused_training


def the_run(folder: Path) -> Path:
    (run_dir,) = folder.glob("outputs/*/*")
    return run_dir


@pytest.fixture(scope="module")
def whole_run(train_once):
    return train_once(*OVERRIDES)


@pytest.mark.multiproc
def test_a_run_in_this_process_stops_after_the_step_and_goes_on_bit_for_bit(tmp_path, whole_run):
    name = "SIGTERM"
    with paused_training(tmp_path, "launcher=in_place") as started:
        started.process.send_signal(signal.SIGTERM)
        started.wait_for_output(f"{name}: saving after this step, then stopping.", timeout=10)
        go_on(tmp_path)
        assert started.wait(timeout=30) == EXIT_STOPPED, started.printed()
        assert f"on request ({name}) after step {PAUSED_AT}, which is saved" in started.stdout()
        assert "python -m framework resume=outputs/toy/" in started.stdout()
        assert "Traceback" not in started.stderr()
    run_dir = the_run(tmp_path)
    record = results.run_file(run_dir)
    assert record["status"] == "stopped"
    assert record["results"]["ended_by"] == f"stopped on request ({name})"
    assert record["results"]["steps"] == results.pointed(run_dir, "last") == PAUSED_AT
    assert not any(path.name.startswith(".") for path in run_dir.iterdir())
    resumed = run_framework(f"resume={run_dir.relative_to(tmp_path)}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Resuming after step {PAUSED_AT}, in epoch 1" in resumed.stdout
    results.assert_same(results.weights(run_dir), results.weights(whole_run))
    assert results.repeated(run_dir) == {}
    assert results.run_file(run_dir)["status"] == "finished"


@pytest.mark.multiproc
def test_ctrl_c_ends_it_at_once(tmp_path):
    """It is Python's own, which debuggers rely on."""
    with paused_training(tmp_path, "launcher=in_place") as started:
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=10) == 130
        started.assert_all_gone()
        assert "Go on from the last checkpoint" in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"
    assert results.pointed(the_run(tmp_path), "last") == 80


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_where_nothing_is_saved_the_first_signal_ends_it(tmp_path, number):
    with paused_training(tmp_path, "launcher=in_place", "checkpoint.enabled=false") as started:
        started.process.send_signal(number)
        assert started.wait(timeout=10) == 130
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"


@pytest.mark.exhaustive
def test_a_sweep_ends_with_the_job_that_was_stopped(tmp_path):
    (tmp_path / "stop.py").write_text(
        "import os, signal\n"
        "class Stopper:\n"
        "    def __init__(self, at): self.at = at\n"
        "    def on_train_step_end(self, report):\n"
        "        if report.step == self.at: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    stopper = ("+callbacks.stop._target_=stop.Stopper", "+callbacks.stop.at=200,20,200")
    result = run_framework("-m", *OVERRIDES, "launcher=in_place", *stopper, cwd=tmp_path)
    assert result.returncode == 130
    lines = result.stdout.splitlines()
    assert "Interrupted in job 1; 1 more were not started." in lines
    (stopped,) = [line for line in lines if line.startswith("1  ")]
    assert stopped.split()[2] == "stopped"
    (line,) = [line for line in lines if line.startswith("[1]")]
    resumed = run_framework(line.split()[-1], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming after step 20" in resumed.stdout


# A run that was started anew after a failure


def restart(run_dir: Path, *, attempt: int) -> int | None:
    pulse = Pulse()
    try:
        topology = Topology(1, 1, 0, 1)
        arguments = RankArguments(str(run_dir), topology, rank=0, rendezvous=None, attempt=attempt)
        return run_rank(arguments, Link(pulse))
    finally:
        pulse.close()


def make_older(run_dir: Path) -> None:
    """Give the event files names of a minute ago: TensorBoard reads them in the order of the second in their names."""
    for path in (run_dir / "tensorboard").iterdir():
        begin, seconds, rest = path.name.split("tfevents.")[0], *path.name.split("tfevents.")[1].split(".", 1)
        path.rename(path.with_name(f"{begin}tfevents.{int(seconds) - 60}.{rest}"))


CAUSE = {
    "world_size": 1,
    "first": {
        **{"rank": 0, "kind": "signal", "node": 0, "host": "here", "local_rank": 0, "pid": 7, "devices": "CPU"},
        **{"phase": "forward", "step": 99, "time": 0.0, "log": "", "status": -11, "signal": "SIGSEGV"},
    },
    "others": [],
}


@pytest.mark.usefixtures("own_state")
def test_a_restart_goes_on_from_the_runs_last_checkpoint_and_is_shown(train, whole_run, capsys):
    every = ("checkpoint.every_n_steps=50", "trainer.log_every_n_steps=10")
    run_dir = train(*OVERRIDES, *every, "trainer.max_steps=110", "checkpoint.save_top_k=-1")
    last = run_dir / "checkpoints" / "last"
    last.unlink()
    last.symlink_to("step_00000100")  # as if it had been killed after step 110
    for name in ("config.yaml", "overrides.yaml"):
        text = (run_dir / name).read_text()
        (run_dir / name).write_text(text.replace("max_steps: 110", "max_steps: null"))
    make_older(run_dir)
    (run_dir / "failure_attempt_0.json").write_text(json.dumps(CAUSE))
    assert restart(run_dir, attempt=1) is None
    printed = capsys.readouterr().out
    assert "Restart 1: resuming after step 100, in epoch 1\nCause: rank 0: killed by SIGSEGV" in printed
    results.assert_same(results.weights(run_dir), results.weights(whole_run))
    assert results.repeated(run_dir) == {}
    assert results.curve(run_dir, "restart/attempt") == {100: 1.0}
    shown = results.events(run_dir)
    assert [(event.step, event.value) for event in shown.Scalars("restart/attempt")] == [(100, 1.0)]
    (text,) = shown.Tensors("restart/text_summary")
    assert text.step == 100
    assert b"killed by SIGSEGV" in text.tensor_proto.string_val[0]
    assert [event.step for event in shown.Scalars("train/loss")] == list(results.curve(run_dir, "train/loss"))


@pytest.mark.usefixtures("own_state")
def test_a_restart_without_a_checkpoint_begins_anew_and_shows_no_step_twice(train, whole_run, capsys):
    run_dir = train(*OVERRIDES, "checkpoint.enabled=false", "trainer.max_steps=60", "trainer.log_every_n_steps=10")
    for name in ("config.yaml", "overrides.yaml"):
        text = (run_dir / name).read_text().replace("max_steps: 60", "max_steps: null")
        (run_dir / name).write_text(text.replace("enabled: false", "enabled: true"))
    make_older(run_dir)
    assert restart(run_dir, attempt=2) is None
    assert "Restart 2: starting from scratch\nCause: not known" in capsys.readouterr().out
    results.assert_same(results.weights(run_dir), results.weights(whole_run))
    assert results.repeated(run_dir) == {}
    steps = [event.step for event in results.events(run_dir).Scalars("train/loss")]
    assert steps == list(results.curve(run_dir, "train/loss")) == list(range(10, 161, 10))


def test_a_run_that_goes_on_from_an_older_checkpoint_stands_there_at_once(train):
    """So that a restart before its first checkpoint doesn't take the later one that was left out on purpose."""
    run_dir = train(*OVERRIDES, "checkpoint.every_n_steps=50", "trainer.max_steps=110", "checkpoint.save_top_k=-1")
    (run_dir.parents[2] / "fail.py").write_text(
        "class Failing:\n    def on_train_step_end(self, report): raise ValueError('no more')\n"
    )
    fail = "+callbacks.fail._target_=fail.Failing"
    train(f"resume={run_dir}/checkpoints/step_00000050", fail, "trainer.max_steps=null", status=1)
    assert results.pointed(run_dir, "last") == 50
