"""A request to stop, by a signal: the run stops after a step, saves it, and resumes exactly; and so does a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from framework.errors import EXIT_STOPPED
from tests.helpers import results
from tests.helpers.command import run_framework
from tests.helpers.stopping import OVERRIDES, PAUSED_AT, continue_training, paused_training


def the_run(folder: Path) -> Path:
    (run_dir,) = folder.glob("outputs/*/*")
    return run_dir


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_an_in_process_run_stops_and_resumes_exactly(train, tmp_path, shared_run):
    with paused_training(tmp_path, "launcher=in_process") as started:
        started.process.send_signal(signal.SIGTERM)
        started.wait_for_output("SIGTERM: stopping as soon as all is saved.", timeout=60)
        continue_training(tmp_path)
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
def test_a_trial_that_is_stopped_alone_can_be_resumed(tmp_path):
    (tmp_path / "stop.py").write_text(
        "import os, signal, time\n"
        "class Stopper:\n"
        "    def __init__(self, at): self.at = at\n"
        "    def on_train_step_end(self, report):\n"
        "        if report.step == self.at: os.kill(os.getpid(), signal.SIGTERM)\n"
        # The launcher passes the signal on. Meanwhile the trial could train to its end.
        "        if report.step >= self.at: time.sleep(0.2)\n"
    )
    stopper = ("+callbacks.stop._target_=stop.Stopper", "+callbacks.stop.at=200,20")
    result = run_framework("-m", *OVERRIDES, *stopper, cwd=tmp_path)
    assert result.returncode == EXIT_STOPPED, result.stderr
    assert "2 trials: 1 finished, 1 stopped" in result.stdout.splitlines()
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("  resume ")]
    resumed = run_framework(*line.split()[-2:], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 trials: 2 finished" in resumed.stdout.splitlines()


# A restart after a failure

FALLS = """
import os, signal
from pathlib import Path

class Falls:
    def __init__(self, after): self.after = after
    def on_train_step_end(self, report):
        if report.step == self.after and not Path("fell").exists():
            Path("fell").touch()
            os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.parametrize("saves", [True, False])
def test_a_restart_is_shown_and_resumes(train, shared_run, tmp_path, saves):
    (tmp_path / "falls.py").write_text(FALLS)
    every = ("trainer.log_every_n_steps=10", "checkpoint.every_n_steps=50", "checkpoint.asynchronous=false")
    elastic = ("launcher=elastic", "launcher.max_restarts=1", f"checkpoint.enabled={str(saves).lower()}")
    falls = ("+callbacks.falls._target_=falls.Falls", "+callbacks.falls.after=113")
    run_dir = train(*OVERRIDES, *every, *elastic, *falls)
    start = 100 if saves else 0
    log = results.log(run_dir)
    assert "Restart 1: " + ("resuming after step 100, in epoch 1" if saves else "starting from scratch") in log
    assert "killed by SIGSEGV" in log
    assert (tmp_path / "fell").exists()
    assert results.repeated(run_dir) == {}
    whole = shared_run(*OVERRIDES, *every)
    assert results.curve(run_dir, "train/loss") == results.curve(whole, "train/loss")
    if saves:
        results.assert_same(results.weights(run_dir), results.weights(whole))
    assert results.curve(run_dir, "restart/attempt") == {start: 1.0}
    shown = results.events(run_dir)
    assert [(event.step, event.value) for event in shown.Scalars("restart/attempt")] == [(start, 1.0)]
    (text,) = shown.Tensors("restart/text_summary")
    assert b"killed by SIGSEGV" in text.tensor_proto.string_val[0]
    assert sorted(event.step for event in shown.Scalars("train/loss")) == list(range(10, 161, 10))
