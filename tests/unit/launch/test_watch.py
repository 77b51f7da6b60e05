from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from framework.launch.process import STOPPED, state_of
from framework.launch.report import main_stack
from framework.launch.standing import Front, Standing
from framework.launch.watch import Limits, NodeWatch, RankFacts
from framework.pulse import Phase, Pulse, PulseReader, make_memory
from tests.helpers.command import ROOT

WAIT_S = 30.0
RANK = """
import sys, time
from framework.launch.heartbeat import beating
from framework.pulse import Phase, Pulse
def stand_still(): time.sleep(300)
pulse = Pulse(int(sys.argv[1]))
pulse.be_seen()
with beating(pulse):
    pulse.at(Phase.DATA)
    stand_still()
"""


@pytest.fixture
def pulses() -> Iterator[Callable[[], tuple[Pulse, PulseReader]]]:
    """Makes the two sides of a rank that is no process: who watches thinks that it has yet to begin."""
    with ExitStack() as stack:

        def make() -> tuple[Pulse, PulseReader]:
            pulse = Pulse()
            stack.callback(pulse.close)
            return pulse, PulseReader(os.dup(pulse.fd))

        yield make


@pytest.fixture
def watched() -> Iterator[Callable[..., NodeWatch]]:
    with ExitStack() as stack:

        def make(*readers: PulseReader, folder: Path | None = None, **limits: float) -> NodeWatch:
            watch = NodeWatch(node=0, limits=Limits(**{**LIMITS, **limits}))
            stack.callback(watch.close)
            for rank, reader in enumerate(readers):
                log = "/dev/null" if folder is None else str(folder / f"rank_{rank}.log")
                watch.add(RankFacts(rank, rank, "CPU", log=log), reader)
            return watch

        yield make


LIMITS = {"init_timeout_s": 60.0, "timeout_s": 60.0, "late_after_s": 0.2}


@pytest.fixture
def rank() -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], PulseReader]]]:
    """Starts a process that loads data without end."""
    with ExitStack() as stack:

        def start() -> tuple[subprocess.Popen[bytes], PulseReader]:
            fd = make_memory()
            process = subprocess.Popen([sys.executable, "-c", RANK, str(fd)], pass_fds=[fd], cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            reader = PulseReader(fd)
            wait_for(lambda: reader.read().phase is Phase.DATA)
            return process, reader

        yield start


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events_until(watch: NodeWatch, kind: str, **how: Any) -> list[dict[str, Any]]:
    """All that it says until it says `kind`."""
    events: list[dict[str, Any]] = []

    def has_come() -> bool:
        events.extend(watch.look(**how))
        return any(event["event"] == kind for event in events)

    wait_for(has_come)
    return events


def test_a_late_rank_is_told_once_and_again_when_it_has_come(pulses: Any, watched: Any) -> None:
    (slow, one), (fast, other) = pulses(), pulses()
    watch = watched(one, other)
    slow.at(Phase.DATA)
    slow.stepped(4)
    slow.beat(9)
    fast.beat(10)
    (late,) = events_until(watch, "late")
    assert {key: late[key] for key in ("rank", "phase", "step")} == {"rank": 0, "phase": "data", "step": 4}
    assert late["seconds"] >= 0.2
    assert watch.look() == []
    slow.beat(10)
    (come,) = events_until(watch, "caught_up")
    assert (come["rank"], come["phase"]) == (0, "data")
    assert watch.statement({})["late"] == [{key: come[key] for key in ("rank", "phase", "step", "seconds")}]


def test_who_came_and_left_at_once_has_come(rank: Any, pulses: Any, watched: Any) -> None:
    (process, one), (fast, other) = rank(), pulses()
    watch = watched(one, other)
    fast.beat(10)
    events_until(watch, "late")
    pulse_of_the_rank = Pulse(os.open(f"/proc/{process.pid}/fd/{_memory_of(process.pid)}", os.O_RDWR))
    pulse_of_the_rank.be_done()
    pulse_of_the_rank.close()
    process.kill()
    process.wait()
    assert [event["event"] for event in watch.look()] == ["caught_up"]


def test_whom_nobody_waits_for_any_more_has_not_come(rank: Any, pulses: Any, watched: Any) -> None:
    """The others have died meanwhile."""
    (slow, one), (process, other) = pulses(), rank()
    slow.beat(9)
    watch = watched(one, other)
    events_until(watch, "late", elsewhere=Front(10, 5.0))
    process.kill()
    process.wait()
    assert watch.look(elsewhere=Front(10, 5.0)) == []


def test_a_rank_that_died_has_not_come(rank: Any, pulses: Any, watched: Any) -> None:
    (process, one), (fast, other) = rank(), pulses()
    watch = watched(one, other)
    fast.beat(10)
    events_until(watch, "late")
    process.kill()
    process.wait()
    assert watch.look() == []


@pytest.mark.parametrize(("step", "limit"), [(0, "init_timeout_s"), (1, "timeout_s")])
def test_past_the_time_out_in_force_a_rank_hangs(
    pulses: Any, watched: Any, monkeypatch: pytest.MonkeyPatch, step: int, limit: str
) -> None:
    monkeypatch.setattr("framework.launch.watch._HUNG_MARGIN_S", 0.0)
    (slow, one), (fast, other) = pulses(), pulses()
    watch = watched(one, other, late_after_s=50.0, **{limit: 0.3})
    for pulse in (slow, fast):
        pulse.stepped(step)
    fast.beat(1)
    events = events_until(watch, "hung")
    assert [event["event"] for event in events] == ["late", "hung"]  # so that the report can tell who it was
    assert events[-1]["seconds"] > 0.3
    assert [each["limit_s"] for each in watch.statement({})["ranks"]] == [0.3, 0.3]


def test_the_time_out_stated_of_a_rank_is_the_one_it_waits_with(pulses: Any, watched: Any) -> None:
    (began, one), (_, other) = pulses(), pulses()
    watch = watched(one, other, init_timeout_s=60.0, timeout_s=20.0)
    began.stepped(1)
    assert [each["limit_s"] for each in watch.statement({})["ranks"]] == [20.0, 60.0]


def test_wishes_are_heard_and_passed_on(pulses: Any, watched: Any) -> None:
    (a, one), (b, other) = pulses(), pulses()
    watch = watched(one, other)
    assert not watched().is_stoppable()
    a.be_stoppable(True)
    assert not watch.is_stoppable()
    b.be_stoppable(True)
    assert watch.is_stoppable()
    assert watch.wish() == 0
    b.wish_to_stop(signal.SIGTERM)
    assert watch.wish() == signal.SIGTERM
    assert watch.asked_to_stop == 0
    watch.ask_to_stop(signal.SIGTERM)
    assert (a.asked_to_stop, b.asked_to_stop, watch.asked_to_stop) == (signal.SIGTERM,) * 3


def test_who_failed_and_who_is_done_is_known_by_word(pulses: Any, watched: Any) -> None:
    (a, one), (b, other) = pulses(), pulses()
    watch = watched(one, other)
    assert watch.failed_by_word() == []
    b.fail({"exception": "no"})
    a.be_done()
    assert watch.failed_by_word() == [1]
    assert (watch.is_done(0), watch.is_done(1)) == (True, False)


def test_a_statement_has_the_stacks_of_the_living_and_continues_the_stopped(rank: Any, watched: Any) -> None:
    (running, one), (stopped, two), (dead, three) = rank(), rank(), rank()
    watch = watched(one, two, three)
    watch.look()
    stopped.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(stopped.pid) in STOPPED)
    dead.kill()
    dead.wait()
    for _ in range(2):  # a report may be made twice
        said = watch.statement({2: {"status": -9, "time": 1.0, "early": False}})["ranks"]
        standings = [each["standing"] for each in said]
        assert [each["pid"] for each in standings] == [running.pid, stopped.pid, dead.pid]
        assert [each["alive"] for each in standings] == [True, True, False]
        assert [each["stopped"] for each in standings] == [False, True, False]
        for each in said[:2]:
            assert next(main_stack(each["stacks"])).endswith("in stand_still")
            assert each["stacks"].count("stand_still") == 1
        assert said[2]["stacks"] is None
        assert [each["oom"] for each in said] == [False] * 3


def test_a_record_that_a_continued_rank_leaves_comes_too_late(
    rank: Any, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hide that the rank was stopped: what it raises then is what became of those that waited for it."""
    process, reader = rank()
    watch = watched(reader)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(process.pid) in STOPPED)
    watch.look()
    pulse_of_the_rank = Pulse(os.open(f"/proc/{process.pid}/fd/{_memory_of(process.pid)}", os.O_RDWR))
    original = watch._stacks

    def continue_it(standings: list[Standing]) -> dict[int, str]:
        pulse_of_the_rank.fail({"exception": "lost"})
        return original(standings)

    monkeypatch.setattr(watch, "_stacks", continue_it)
    assert watch.statement({})["ranks"][0]["record"] is None
    pulse_of_the_rank.close()


def _memory_of(pid: int) -> str:
    fds = Path(f"/proc/{pid}/fd")
    return next(fd.name for fd in fds.iterdir() if "framework_pulse" in str(fd.readlink()))


CRASH = (
    'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "a", line 1 in f\n'
)
NCCL = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"


@pytest.mark.parametrize("status", [-11, -6, 1, None])
def test_what_the_log_of_one_that_ended_tells(pulses: Any, watched: Any, tmp_path: Path, status: int | None) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text(NCCL + CRASH)  # of the attempt before
    watch = watched(pulses()[1], folder=tmp_path)
    end = {0: {"status": status, "time": 1.0, "early": False}}
    (said,) = watch.statement(end)["ranks"]
    assert (said["stacks"], said["nccl_timeout"]) == (None, False)
    with log.open("a") as file:
        file.write("more\n" + NCCL + CRASH)
    (said,) = watch.statement(end)["ranks"]
    assert said["stacks"] == (CRASH if status is None or status < 0 else None)
    assert said["nccl_timeout"]
    assert not watch.statement({})["ranks"][0]["nccl_timeout"]
