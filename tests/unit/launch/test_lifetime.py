from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import framework
from framework.launch.lifetime import die_with_parent
from tests.helpers import processes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's request is Linux's")

_SLEEPING_CHILD = """
import os, time
from framework.launch.lifetime import die_with_parent
{request}
print(os.getpid(), flush=True)
time.sleep(60)
"""
_PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


@contextmanager
def parent_and_child(*, request: str) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    command = [sys.executable, "-c", _PARENT, _SLEEPING_CHILD.format(request=request)]
    environment = {**os.environ, "PYTHONPATH": str(Path(framework.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        parent, child = psutil.Process(started.pid), psutil.Process(int(started.stdout.readline()))
        try:
            yield parent, child
        finally:
            # A zombie that nobody waited for yet is as good as gone.
            for process in (parent, child):
                if is_alive(process):
                    process.kill()
            assert processes.settle(lambda: [child] if is_alive(child) else [], within_s=5.0) == []


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_whatever_ends_that(number: signal.Signals) -> None:
    with parent_and_child(request="die_with_parent(os.getppid())") as (parent, child):
        assert is_alive(child)
        parent.send_signal(number)
        assert processes.settle(lambda: [child] if is_alive(child) else [], within_s=5.0) == []


def test_without_the_request_a_child_goes_on() -> None:
    """What the test above would see if nothing was asked of the kernel."""
    with parent_and_child(request="") as (parent, child):
        parent.kill()
        assert processes.settle(lambda: [child] if is_alive(child) else [], within_s=0.5) == [child]


def test_a_child_whose_parent_has_ended_already_leaves_at_once() -> None:
    code = "from framework.launch.lifetime import die_with_parent\ndie_with_parent(1 << 30)\nprint('still here')"
    environment = {**os.environ, "PYTHONPATH": str(Path(framework.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


def test_elsewhere_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this very process would end: the number isn't its parent's."""
    monkeypatch.setattr(sys, "platform", "darwin")
    die_with_parent(1 << 30)
