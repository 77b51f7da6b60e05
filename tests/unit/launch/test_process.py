from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from framework.launch.process import STOPPED, Process, state_of


@pytest.fixture(params=["pidfd", "none", "refused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `pidfd_open`: a Python built for old kernels has none, and an old kernel refuses it."""
    if request.param == "none":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param == "refused":
        monkeypatch.setattr(os, "pidfd_open", _refuse)


def _refuse(_pid: int) -> int:
    raise OSError(38, "Function not implemented")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("kernel")
def test_a_process_lives_until_it_has_ended_reaped_or_not(sleeper: subprocess.Popen[bytes]) -> None:
    process = Process(sleeper.pid)
    try:
        assert process.is_alive()
        process.send(signal.SIGKILL)
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_alive()
        sleeper.wait()
        assert not process.is_alive()
        with pytest.raises(ProcessLookupError):
            process.send(0)
    finally:
        process.close()


@pytest.mark.usefixtures("kernel")
def test_one_that_has_ended_before_it_was_seen() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = Process(gone.pid)
    assert not process.is_alive()
    with pytest.raises(ProcessLookupError):
        process.send(0)
    process.close()


def test_another_process_with_the_same_number_is_not_it(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process = Process(sleeper.pid)
    monkeypatch.setattr(process, "_born", "12")
    assert not process.is_alive()
    with pytest.raises(ProcessLookupError):
        process.send(signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_stopped_process_is_seen(sleeper: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10.0
    sleeper.send_signal(signal.SIGSTOP)
    while state_of(sleeper.pid) not in STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
