"""Requests to stop a run of several processes: whoever gets the signal, all ranks save one step together and leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from framework.errors import EXIT_STOPPED
from tests.helpers import results
from tests.helpers.command import Started, started_framework
from tests.helpers.stopping import OVERRIDES, PAUSED_AT, go_on, paused_training

pytestmark = pytest.mark.multiproc
EVERYONE = [
    pytest.param(signal.SIGTERM, False, id="SIGTERM-parent", marks=pytest.mark.exhaustive),
    pytest.param(signal.SIGINT, True, id="SIGINT-everyone"),
    pytest.param(signal.SIGTERM, True, id="SIGTERM-everyone", marks=pytest.mark.exhaustive),
    pytest.param(signal.SIGINT, False, id="SIGINT-parent", marks=pytest.mark.exhaustive),
]
"""The signal, and whether all processes get it or the parent alone."""


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


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize(
    ("procs", "everyone"),
    [
        pytest.param(4, True, id="4-everyone"),
        *(
            pytest.param(procs, who == "everyone", id=f"{procs}-{who}", marks=pytest.mark.exhaustive)
            for procs, who in [(1, "parent"), (1, "everyone"), (2, "parent"), (2, "everyone"), (4, "parent")]
        ),
    ],
)
def test_all_ranks_stop_after_one_step_and_go_on_from_it(
    train: Callable[..., Path], tmp_path: Path, procs: int, everyone: bool, whole_run: Path
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
    train(f"resume={run_dir}")
    assert f"Resuming after step {step}" in results.log(run_dir)
    assert results.results(run_dir)["steps"] == 160
    # The order of sums differs between numbers of processes.
    results.assert_same(results.weights(run_dir), results.weights(whole_run), tolerance=0.0 if procs == 1 else 1e-6)


@pytest.fixture(scope="module")
def whole_run(train_once: Callable[..., Path]) -> Path:
    return train_once(*OVERRIDES)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (signal.SIGTERM, signal.SIGUSR1))],
)
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


@pytest.mark.exhaustive  # with one that never saves: test_endings.py
def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    with paused_training(tmp_path, procs=2) as started:
        started.process.send_signal(signal.SIGINT)
        started.wait_for_output("Ctrl-C again ends at once", timeout=10)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=10) == 130
        started.assert_all_gone()
        assert "Go on from the last checkpoint" in started.stderr()
    assert results.run_file(the_run(tmp_path))["status"] == "interrupted"


@pytest.mark.parametrize(("number", "everyone"), EVERYONE)
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


@pytest.mark.parametrize(("number", "everyone"), EVERYONE)
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
