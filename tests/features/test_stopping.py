"""A request to stop, by a signal: the run stops after a step, saves it, and resumes exactly; and so does a restart."""

from __future__ import annotations

import json
import shutil
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


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_a_run_in_this_process_stops_after_the_step_and_resumes_exactly(train, tmp_path, shared_run):
    with paused_training(tmp_path, "launcher=in_place") as started:
        started.process.send_signal(signal.SIGTERM)
        started.wait_for_output("SIGTERM: saving after this step, then stopping.", timeout=60)
        go_on(tmp_path)
        assert started.wait(timeout=60) == EXIT_STOPPED, started.printed()
        assert "python -m framework resume=outputs/toy/" in started.stdout()
        assert "Traceback" not in started.stderr()
    run_dir = the_run(tmp_path)
    record = results.run_file(run_dir)
    assert record["status"] == "stopped"
    assert "SIGTERM" in record["results"]["ended_by"]
    assert record["results"]["steps"] == results.pointed(run_dir, "last") == PAUSED_AT
    assert not any(path.name.startswith(".") for path in run_dir.iterdir())
    train(f"resume={run_dir}", "launcher=local")
    assert f"Resuming after step {PAUSED_AT}, in epoch 1" in results.log(run_dir)
    results.assert_same(results.weights(run_dir), results.weights(shared_run(*OVERRIDES)))
    assert results.repeated(run_dir) == {}
    assert results.run_file(run_dir)["status"] == "finished"


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("number", "saves"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["ctrl_c", "nothing_is_saved"]
)
def test_ctrl_c_ends_it_without_saving_and_so_does_any_signal_if_nothing_is_saved(tmp_path, number, saves):
    """Ctrl-C is Python's own, which debuggers rely on."""
    options = () if saves else ("checkpoint.enabled=false",)
    with paused_training(tmp_path, "launcher=in_place", *options) as started:
        started.process.send_signal(number)
        assert started.wait(timeout=60) == 130
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"
    if saves:
        assert results.pointed(the_run(tmp_path), "last") == 80


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


# A restart after a failure


def restart(run_dir: Path, *, attempt: int) -> int | None:
    pulse = Pulse()
    try:
        arguments = RankArguments(str(run_dir), Topology(1, 1, 0, 1), rank=0, rendezvous=None, attempt=attempt)
        return run_rank(arguments, Link(pulse))
    finally:
        pulse.close()


def interrupted(whole: Path, folder: Path, change: tuple[str, str]) -> Path:
    """A copy of a run of OVERRIDES that had ended early by another configuration; its event files a minute older.

    TensorBoard reads them in the order of the second in their names.
    """
    run_dir = Path(shutil.copytree(whole, folder / "outputs" / "toy" / whole.name, symlinks=True))
    for name in ("config.yaml", "overrides.yaml"):
        (run_dir / name).write_text(
            (run_dir / name).read_text().replace(*change).replace("enabled: false", "enabled: true")
        )
    for path in (run_dir / "tensorboard").iterdir():
        begin, rest = path.name.split("tfevents.")
        seconds, rest = rest.split(".", 1)
        path.rename(path.with_name(f"{begin}tfevents.{int(seconds) - 60}.{rest}"))
    return run_dir


CAUSE = {
    "world_size": 1,
    "first": {
        **{"rank": 0, "kind": "signal", "node": 0, "host": "here", "local_rank": 0, "pid": 7, "devices": "CPU"},
        **{"phase": "forward", "step": 99, "time": 0.0, "log": "", "status": -11, "signal": "SIGSEGV"},
    },
    "others": [],
}


@pytest.mark.usefixtures("own_state")
def test_a_restart_resumes_from_the_last_checkpoint_and_is_shown(shared_run, tmp_path, monkeypatch, capsys):
    every = ("checkpoint.every_n_steps=50", "trainer.log_every_n_steps=10", "checkpoint.save_top_k=-1")
    ended = shared_run(*OVERRIDES, *every, "trainer.max_steps=110")
    run_dir = interrupted(ended, tmp_path, ("max_steps: 110", "max_steps: null"))
    last = run_dir / "checkpoints" / "last"
    last.unlink()
    last.symlink_to("step_00000100")  # as if it had been killed after step 110
    (run_dir / "failure_attempt_0.json").write_text(json.dumps(CAUSE))
    monkeypatch.chdir(tmp_path)
    assert restart(run_dir, attempt=1) is None
    printed = capsys.readouterr().out
    assert "Restart 1: resuming after step 100, in epoch 1" in printed
    assert "killed by SIGSEGV" in printed
    results.assert_same(results.weights(run_dir), results.weights(shared_run(*OVERRIDES)))
    assert results.repeated(run_dir) == {}
    assert results.curve(run_dir, "restart/attempt") == {100: 1.0}
    shown = results.events(run_dir)
    assert [(event.step, event.value) for event in shown.Scalars("restart/attempt")] == [(100, 1.0)]
    (text,) = shown.Tensors("restart/text_summary")
    assert text.step == 100
    assert b"killed by SIGSEGV" in text.tensor_proto.string_val[0]
    assert [event.step for event in shown.Scalars("train/loss")] == list(results.curve(run_dir, "train/loss"))


@pytest.mark.usefixtures("own_state")
def test_a_restart_without_a_checkpoint_starts_from_scratch_and_logs_no_step_twice(
    shared_run, tmp_path, monkeypatch, capsys
):
    ended = shared_run(*OVERRIDES, "checkpoint.enabled=false", "trainer.max_steps=60", "trainer.log_every_n_steps=10")
    run_dir = interrupted(ended, tmp_path, ("max_steps: 60", "max_steps: null"))
    monkeypatch.chdir(tmp_path)
    assert restart(run_dir, attempt=2) is None
    assert "Restart 2: starting from scratch" in capsys.readouterr().out
    results.assert_same(results.weights(run_dir), results.weights(shared_run(*OVERRIDES)))
    assert results.repeated(run_dir) == {}
    steps = [event.step for event in results.events(run_dir).Scalars("train/loss")]
    assert steps == list(results.curve(run_dir, "train/loss")) == list(range(10, 161, 10))
