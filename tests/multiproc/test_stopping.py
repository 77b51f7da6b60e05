"""Requests to stop: whoever gets the signal, all ranks save one step together and leave; where nothing can be saved, or
on a second Ctrl-C, the run ends at once."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil
import pytest

from framework.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.helpers import results
from tests.helpers.stopping import OVERRIDES, PAUSE, PAUSED_AT, continue_training, wait_until, while_paused, write_pause

pytestmark = pytest.mark.multiproc
exhaustive = pytest.mark.exhaustive


class UnhandledSignalError(Exception):
    """Raised by a signal that the command doesn't handle, which would end pytest otherwise."""


def _unhandled(number: int, _frame: FrameType | None) -> None:
    raise UnhandledSignalError(signal.Signals(number).name)


@pytest.fixture(autouse=True)
def _guarded(own_state: None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _unhandled)


@pytest.fixture
def terminal() -> io.StringIO:
    """What commands that are to be stopped print on stderr."""
    return io.StringIO()


@pytest.fixture(scope="module")
def whole_run(shared_run: Callable[..., Path]) -> Path:
    return shared_run(*OVERRIDES)


def training(procs: int, *overrides: str) -> tuple[str, ...]:
    return (*OVERRIDES, *PAUSE, f"topology.procs_per_node={procs}", *overrides)


def paused_pids(folder: Path, procs: int) -> list[int]:
    """The ranks, in their order, once all are at the step where they wait."""
    files = [folder / f"paused_{rank}" for rank in range(procs)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def send(number: signal.Signals, *, everyone: bool, rank_pid: int) -> None:
    """Send a signal to the command alone, or to all its processes, as terminals and schedulers do."""
    if everyone:
        server = psutil.Process(rank_pid).parent()
        assert server is not None
        for process in (server, *server.children(recursive=True)):
            process.send_signal(number)
    os.kill(os.getpid(), number)


class Stop(NamedTuple):
    """A signal that is sent to the command, or to everyone of its processes."""

    number: signal.Signals
    to_everyone: bool
    procs: int
    override: str = "data.num_workers=0"


@pytest.mark.parametrize(
    "stop",
    [
        Stop(number=signal.SIGTERM, to_everyone=True, procs=2),
        pytest.param(Stop(number=signal.SIGTERM, to_everyone=False, procs=1), marks=exhaustive),
        pytest.param(
            Stop(number=signal.SIGINT, to_everyone=True, procs=4, override="data.num_workers=1"), marks=exhaustive
        ),
        pytest.param(
            Stop(number=signal.SIGINT, to_everyone=False, procs=2, override="launcher=elastic"), marks=exhaustive
        ),
        pytest.param(
            Stop(number=signal.SIGUSR2, to_everyone=True, procs=2, override="data.num_workers=2"), marks=exhaustive
        ),
    ],
)
def test_all_ranks_stop_together_and_resume_exactly(
    train: Callable[..., Path],
    tmp_path: Path,
    terminal: io.StringIO,
    capfd: pytest.CaptureFixture[str],
    whole_run: Path,
    stop: Stop,
) -> None:
    write_pause(tmp_path)
    name = "Ctrl-C" if stop.number == signal.SIGINT else stop.number.name

    def send_signal() -> None:
        try:
            send(stop.number, everyone=stop.to_everyone, rank_pid=paused_pids(tmp_path, stop.procs)[0])
            wait_until(lambda: f"{name}: stopping as soon as all is saved" in terminal.getvalue())
        finally:
            continue_training(tmp_path)

    with while_paused(send_signal), redirect_stderr(terminal):
        run_dir = train(*training(stop.procs, stop.override), status=EXIT_STOPPED)
    assert "Restart" not in terminal.getvalue()
    assert "python -m framework resume=outputs/toy/" in capfd.readouterr().out
    assert_stopped(run_dir, name, step=PAUSED_AT + (0 if stop.procs == 1 else 2))
    train(f"resume={run_dir}")
    # The order of sums differs between numbers of processes.
    results.assert_same(
        results.weights(run_dir), results.weights(whole_run), tolerance=0.0 if stop.procs == 1 else 1e-6
    )


def assert_stopped(run_dir: Path, name: str, *, step: int) -> None:
    record = results.run_file(run_dir)
    assert (record["status"], record["results"]["ended_by"]) == ("stopped", f"stopped on request ({name})")
    assert record["results"]["steps"] == results.pointed(run_dir, "last") == step
    assert not (run_dir / "failure.json").exists()


SENDER = """
import os

class Sender:
    def __init__(self, number): self.number = number
    def on_train_step_end(self, report):
        if report.step == 21:
            for _ in range(2): os.kill(os.getpid(), self.number)  # schedulers send theirs more than once
"""


@pytest.mark.parametrize(
    ("number", "override", "status"),
    [
        (signal.SIGTERM, "checkpoint.enabled=true", EXIT_STOPPED),
        # Python's own handler, on which debuggers rely.
        (signal.SIGINT, "checkpoint.enabled=true", EXIT_INTERRUPTED),
        (signal.SIGTERM, "checkpoint.enabled=false", EXIT_INTERRUPTED),
    ],
)
def test_a_rank_in_process_handles_signals_itself(
    train: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    whole_run: Path,
    number: signal.Signals,
    override: str,
    status: int,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (tmp_path / "sender.py").write_text(SENDER)
    sender = ("+callbacks.sender._target_=sender.Sender", f"+callbacks.sender.number={int(number)}")
    try:
        run_dir = train(*OVERRIDES, "launcher=in_process", override, *sender, status=status)
    except KeyboardInterrupt:
        # The exception would end pytest.
        pytest.fail("the command did not handle the signal")
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    if status == EXIT_INTERRUPTED:
        assert results.run_file(run_dir)["status"] == "interrupted"
        assert not results.saved_steps(run_dir)
        return
    assert printed.err.count(f"{number.name}: stopping as soon as all is saved. Ctrl-C ends at once.") == 1
    assert_stopped(run_dir, number.name, step=21)
    train(f"resume={run_dir}", "launcher=in_process")
    results.assert_same(results.weights(run_dir), results.weights(whole_run))


def test_a_signal_to_one_rank_stops_all(train: Callable[..., Path], tmp_path: Path) -> None:
    """`nohup` has SIGHUP ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    write_pause(tmp_path)

    def stop() -> None:
        try:
            pids = paused_pids(tmp_path, 2)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(pids[1], signal.SIGUSR1)
        finally:
            continue_training(tmp_path)

    with while_paused(stop):
        run_dir = train(*training(2, "trainer.max_epochs=100000"), status=EXIT_STOPPED)
    assert results.results(run_dir)["ended_by"] == "stopped on request (SIGUSR1)"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_second_ctrl_c_ends_the_run(train: Callable[..., Path], tmp_path: Path, terminal: io.StringIO) -> None:
    write_pause(tmp_path)

    def interrupt() -> None:
        paused_pids(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: "Ctrl-C again ends at once" in terminal.getvalue())
        os.kill(os.getpid(), signal.SIGINT)

    with while_paused(interrupt), redirect_stderr(terminal):
        run_dir = train(*training(2), status=EXIT_INTERRUPTED)
    assert "resume=outputs/toy/" in terminal.getvalue()
    assert results.run_file(run_dir)["status"] == "interrupted"
    assert results.pointed(run_dir, "last") == 80


SLOW = """
import os, time
from pathlib import Path
from typing import NamedTuple
import recipes.toy

def slow(**keywords):
    Path(f"paused_{os.environ['RANK']}.tmp").write_text(str(os.getpid()))
    Path(f"paused_{os.environ['RANK']}.tmp").rename(f"paused_{os.environ['RANK']}")
    time.sleep(300)
"""


@pytest.mark.parametrize(
    ("number", "everyone", "override", "status"),
    [
        (signal.SIGTERM, True, "checkpoint.enabled=false", EXIT_INTERRUPTED),
        (signal.SIGUSR2, False, "data.datasets._target_=slow.slow", EXIT_STOPPED),
        *(
            pytest.param(number, everyone, override, status, marks=exhaustive)
            for number, everyone, override, status in [
                (signal.SIGINT, True, "checkpoint.enabled=false", EXIT_INTERRUPTED),
                (signal.SIGINT, True, "data.datasets._target_=slow.slow", EXIT_INTERRUPTED),
                (signal.SIGHUP, True, "data.datasets._target_=slow.slow", EXIT_STOPPED),
            ]
        ),
    ],
)
def test_without_saving_the_first_signal_ends_the_run(
    train: Callable[..., Path],
    tmp_path: Path,
    terminal: io.StringIO,
    number: signal.Signals,
    everyone: bool,
    override: str,
    status: int,
) -> None:
    """Checkpoints are off, or training hasn't begun, so a scheduler loses nothing by starting the run again."""
    write_pause(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)

    def end() -> None:
        send(number, everyone=everyone, rank_pid=paused_pids(tmp_path, 2)[0])

    with while_paused(end), redirect_stderr(terminal):
        run_dir = train(*training(2, override), status=status)
    assert "Traceback" not in terminal.getvalue()
    assert results.run_file(run_dir)["status"] == ("stopped" if status == EXIT_STOPPED else "interrupted")
    assert (f"Stopped by {number.name} before the first step" in terminal.getvalue()) == (status == EXIT_STOPPED)


TESTED = """
import os, time
from pathlib import Path
from typing import NamedTuple
from framework.tasks import Supervised

class Paused(Supervised):
    # Waits in the first batch of the test until there is a file `go`.
    has_trained = False
    def on_fit_end(self):
        self.has_trained = True
    def validation_step(self, model, batch):
        if self.has_trained and not Path("go").exists():
            file = Path(f"paused_{os.environ.get('RANK', '0')}")
            file.with_suffix(".tmp").write_text(str(os.getpid()))
            file.with_suffix(".tmp").rename(file)
            while not Path("go").exists():
                time.sleep(0.01)
        return super().validation_step(model, batch)
"""


@pytest.mark.parametrize(
    ("number", "procs", "override"),
    [
        (signal.SIGUSR1, 2, "launcher=local"),
        *(
            pytest.param(*values, marks=exhaustive)
            for values in [
                (signal.SIGINT, 1, "launcher=local"),
                (signal.SIGTERM, 1, "launcher=in_process"),
                (signal.SIGUSR2, 2, "strategy=fsdp"),
            ]
        ),
    ],
)
def test_a_stopped_final_test_is_run_by_resuming(
    train: Callable[..., Path], tmp_path: Path, number: signal.Signals, procs: int, override: str
) -> None:
    """Of two ranks, the one with the second half of the samples has more batches to do when it is asked to stop."""
    (tmp_path / "tested.py").write_text(TESTED)
    task = ("task._target_=tested.Paused", "trainer.limit_test_batches=null", "data.eval_batch_size=10")

    def stop() -> None:
        try:
            paused_pids(tmp_path, procs)
            os.kill(os.getpid(), number)
        finally:
            continue_training(tmp_path)

    with while_paused(stop):
        run_dir = train(*OVERRIDES, *task, f"topology.procs_per_node={procs}", override, status=EXIT_STOPPED)
    record = results.run_file(run_dir)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert record["results"]["ended_by"] == f"stopped on request ({name}) during the test"
    assert (record["status"], record["results"]["test"]) == ("stopped", None)
    assert not (run_dir / "failure.json").exists()
    train(f"resume={run_dir}")
    assert results.run_file(run_dir)["status"] == "finished"
    assert list(results.curve(run_dir, "test/loss")) == [results.pointed(run_dir, "last")]
