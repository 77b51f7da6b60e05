"""What the ranks of a run have forked ends with the run, and is named."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers import results
from tests.helpers.command import started_framework
from tests.helpers.stopping import wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
exhaustive = pytest.mark.exhaustive
Train = Callable[..., Path]

LEAVING = r"""
import os, signal, subprocess, sys, time
from pathlib import Path

UPLOADS = '''
import signal, sys, time
from pathlib import Path
def upload(*_):
    time.sleep(1)
    Path("uploaded").touch()
    sys.exit()
signal.signal(signal.SIGTERM, upload)
Path(f"left_{sys.argv[1]}").touch()
time.sleep(600)
'''
STUBBORN = '''
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"left_{os.getpid()}").touch()
time.sleep(600)
'''

def note(pid):
    Path(f"left_{pid}").touch()

class Leaves:
    def __init__(self, what):
        self.what = what

    def on_train_step_end(self, report):
        if report.step == 2:
            getattr(self, self.what)()

    def forks(self):
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            note(pid)

    def session(self):
        note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)

    def daemon(self):
        '''A process whose parent has ended already.'''
        command = "setsid sleep 600 >/dev/null & echo $!"
        note(int(subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout))

    def uploads(self):
        process = subprocess.Popen([sys.executable, "-c", UPLOADS, "uploads"])
        while not Path("left_uploads").exists():
            time.sleep(0.01)
        Path("left_uploads").rename(f"left_{process.pid}")

    def stubborn(self):
        process = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
        while not Path(f"left_{process.pid}").exists():
            time.sleep(0.01)

    def copies(self):
        '''Fork the rank; both processes continue as ranks.'''
        pid = os.fork()
        if pid:
            note(pid)

    def forks_and_raises(self):
        self.forks()
        raise ValueError("the failure")

    def forks_and_waits(self):
        self.forks()
        time.sleep(600)
"""


def leaves(what: str) -> tuple[str, ...]:
    return "recipe=toy", "trainer.max_steps=20", f"+callbacks.leaves={{_target_: leaving.Leaves, what: {what}}}"


def left(folder: Path) -> list[int]:
    """The process ids of what a rank left behind."""
    return [int(file.name.removeprefix("left_")) for file in folder.glob("left_*")]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)


@pytest.mark.parametrize(
    ("what", "number", "named"),
    [
        ("forks", 5, r"pid {} \(a fork of a rank\)"),
        ("daemon", 1, r"pid {} \(sleep 600\)"),
        ("uploads", 1, r"pid {} \(.*python.*"),
        pytest.param("session", 1, r"pid {} \(sleep 600\)", marks=exhaustive),
        pytest.param("stubborn", 1, r"pid {} \(.*python.*", marks=exhaustive),
    ],
)
def test_what_a_rank_forks_ends_with_the_run(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, number: int, named: str
) -> None:
    run_dir = train(*leaves(what))
    pids = left(tmp_path)
    assert len(pids) == number
    assert not any(map(psutil.pid_exists, pids))
    assert results.run_file(run_dir)["status"] == "finished"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Left behind by the ranks")]
    for pid in pids:
        assert re.search(named.format(pid), line)
    assert line.count("pid ") == number
    assert (tmp_path / "uploaded").exists() == (what == "uploads")


@pytest.mark.parametrize("procs", [1, pytest.param(2, marks=exhaustive)])
def test_what_a_rank_forks_ends_after_a_failure(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str], procs: int
) -> None:
    train(*leaves("forks_and_raises"), f"topology.procs_per_node={procs}", status=1)
    pids = left(tmp_path)
    assert len(pids) == 5 * procs
    assert not any(map(psutil.pid_exists, pids))
    printed = capfd.readouterr().err
    assert "ValueError: the failure" in printed
    assert "Left behind by the ranks, and ended: pid" in printed


def test_a_copy_of_a_rank_does_not_train(train: Train, tmp_path: Path) -> None:
    """Steps, logs and checkpoints are the rank's alone."""
    run_dir = train(*leaves("copies"), "trainer.log_every_n_steps=1", "logger=jsonl", "checkpoint.every_n_steps=5")
    assert not any(map(psutil.pid_exists, left(tmp_path)))
    steps = [row["step"] for row in results.rows(run_dir) if "train/loss" in row]
    assert steps == list(range(1, 21))
    assert "is a copy of this rank" in results.log(run_dir)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=exhaustive)])
def test_what_a_rank_forks_ends_with_the_command(tmp_path: Path, how: signal.Signals) -> None:
    """The command is killed, or interrupted twice."""
    with started_framework("trainer.gpus=0", *leaves("forks_and_waits"), cwd=tmp_path) as started:
        wait_until(lambda: len(left(tmp_path)) == 5 or started.process.poll() is not None)
        started.process.send_signal(how)
        if how == signal.SIGINT:
            started.wait_for_output("Ctrl-C again ends at once", timeout=30)
            time.sleep(0.1)
            started.process.send_signal(how)
        assert started.wait(timeout=30) == (130 if how == signal.SIGINT else -how)
        started.assert_all_gone(within_s=30)
        assert "Left behind by the ranks, and ended: pid" in started.stderr()
