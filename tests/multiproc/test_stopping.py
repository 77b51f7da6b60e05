"""Requests to stop a run of several processes: whoever gets the signal, all ranks save one step together and leave."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from framework.errors import EXIT_STOPPED
from tests.helpers import results
from tests.helpers.command import Started, run_framework, started_framework
from tests.helpers.stopping import OVERRIDES, PAUSED_AT, go_on, paused_training

pytestmark = pytest.mark.multiproc


def the_run(folder: Path) -> Path:
    (run_dir,) = folder.glob("outputs/*/*")
    return run_dir


def signal_all(started: Started, number: signal.Signals) -> None:
    """As schedulers and terminals do: to every process there is, in no order."""
    for process in started.processes():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stop(started: Started, folder: Path, number: signal.Signals, *, everyone: bool) -> None:
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    if everyone:
        signal_all(started, number)
    else:
        started.process.send_signal(number)
    started.wait_for_output(f"{name}: saving after a coming step", timeout=10)
    go_on(folder)
    assert started.wait(timeout=30) == EXIT_STOPPED, started.printed()
    started.assert_all_gone()
    assert "Traceback" not in started.stderr()


@pytest.mark.parametrize("everyone", [False, True], ids=["parent", "everyone"])
@pytest.mark.parametrize("procs", [1, 2, 4])
def test_all_ranks_stop_after_one_step_and_go_on_from_it(
    tmp_path: Path, procs: int, everyone: bool, whole_run: Path
) -> None:
    with paused_training(tmp_path, procs=procs) as started:
        stop(started, tmp_path, signal.SIGTERM, everyone=everyone)
        assert "python -m framework resume=outputs/toy/" in started.stdout()
    run_dir = the_run(tmp_path)
    record = results.run_file(run_dir)
    step = PAUSED_AT if procs == 1 else PAUSED_AT + 2
    assert record["status"] == "stopped"
    assert record["results"]["ended_by"] == "stopped on request (SIGTERM)"
    assert record["results"]["steps"] == results.pointed(run_dir, "last") == step
    assert not (run_dir / "failure.json").exists()
    resumed = run_framework(f"resume={run_dir}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Going on after step {step}" in resumed.stdout
    assert results.results(run_dir)["steps"] == 160
    # The order of sums differs between numbers of processes.
    results.assert_same(results.weights(run_dir), results.weights(whole_run), tolerance=0.0 if procs == 1 else 1e-6)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    result = run_framework(*OVERRIDES, cwd=folder)
    assert result.returncode == 0, result.stderr
    return the_run(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_data_workers_go_on_until_training_has_stopped(tmp_path: Path, number: signal.Signals) -> None:
    with paused_training(tmp_path, "data.num_workers=2", procs=2) as started:
        stop(started, tmp_path, number, everyone=True)
    assert results.results(the_run(tmp_path))["steps"] == PAUSED_AT + 2


def test_a_signal_to_one_rank_is_a_request_to_all(tmp_path: Path) -> None:
    with paused_training(tmp_path, "trainer.max_epochs=100000", procs=2) as started:
        youngest = max(started.processes(), key=lambda process: process.create_time())  # ranks come after the keeper
        youngest.send_signal(signal.SIGUSR1)
        go_on(tmp_path)
        assert started.wait(timeout=30) == EXIT_STOPPED, started.printed()
        started.assert_all_gone()
    assert results.results(the_run(tmp_path))["ended_by"] == "stopped on request (SIGUSR1)"


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    with paused_training(tmp_path, procs=2) as started:
        started.process.send_signal(signal.SIGINT)
        started.wait_for_output("Ctrl-C again ends at once", timeout=10)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=10) == 130
        started.assert_all_gone()
        assert "Go on from the last checkpoint" in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"


@pytest.mark.parametrize("everyone", [False, True], ids=["parent", "everyone"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_is_saved_the_first_signal_ends_it(
    tmp_path: Path, number: signal.Signals, everyone: bool
) -> None:
    with paused_training(tmp_path, "checkpoint.enabled=false", procs=2) as started:
        if everyone:
            signal_all(started, number)
        else:
            started.process.send_signal(number)
        assert started.wait(timeout=10) == 130, started.printed()
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"


SLOW = """
import os, time
from pathlib import Path
import recipes.toy

def slow(**keywords):
    Path(f"building_{os.environ['RANK']}").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize("everyone", [False, True], ids=["parent", "everyone"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training_begins_the_first_signal_ends_it(
    tmp_path: Path, number: signal.Signals, everyone: bool
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    slow = ("topology.procs_per_node=2", "data.datasets._target_=slow.slow")
    with started_framework(*OVERRIDES, *slow, cwd=tmp_path) as started:
        deadline = time.monotonic() + 60.0
        while len(list(tmp_path.glob("building_*"))) < 2:
            assert started.process.poll() is None, started.printed()
            assert time.monotonic() < deadline, started.printed()
            time.sleep(0.02)
        if everyone:
            signal_all(started, number)
        else:
            started.process.send_signal(number)
        assert started.wait(timeout=10) == 130, started.printed()
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"
