"""One trial, one worker: whatever is killed, suspended or slow, and whatever its clock says."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from framework.errors import DiskError, RunError
from tests.helpers.command import Started, run_python, started_python
from tests.helpers.disks import full_at
from tests.helpers.internals import Claims, claims_module, exclusive

LOST_S = claims_module.HEARTBEAT_LOST_S
# A second look at a claim that nobody touches is due after this time.
SECOND_LOOK_S = LOST_S / 6

COMPLETES_TRIALS = """
import fcntl, os, random, sys, time
from pathlib import Path
from tests.helpers.internals import Claims

folder = Path(sys.argv[1])
own = random.Random(int(sys.argv[2]))
claims = Claims(folder / "claims", "worker " + sys.argv[2])

def is_done(number):
    return any(folder.glob(f"done/{number}.*"))

left = list(range(200))
while left:
    number = own.choice(left)
    claims.beat()
    if claims.take(number) is None:
        left = [number for number in left if not is_done(number)]
        continue
    if not is_done(number):
        with (folder / "running" / str(number)).open("w") as file:
            # Released by the kernel if this process is killed. An exception if another worker has it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(own.uniform(0, 0.01))
            (folder / "done" / f"{number}.{os.getpid()}.{time.monotonic_ns()}").touch()
    claims.release(number)
    left.remove(number)
"""

HOLDS_ONE = """
import sys, time
from pathlib import Path
from tests.helpers.internals import Claims

claims = Claims(Path(sys.argv[1]), "the first", lost_s=float(sys.argv[2]))
assert claims.take(0) is not None
print("taken", flush=True)
while not claims.is_lost(0):
    claims.beat()
    time.sleep(0.02)
claims.release(0)
print("lost", flush=True)
"""

COUNTS = """
import sys
from pathlib import Path
from tests.helpers.internals import exclusive

folder = Path(sys.argv[1])
for _ in range(40):
    with exclusive(folder / "lock"):
        number = int((folder / "number").read_text())
        (folder / "number").write_text(str(number + 1))
"""


class Clock:
    """Stands for the module `time` of the workers in this process."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(claims_module, "time", clock)
    return clock


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Claims:
    """A worker on another machine."""
    with monkeypatch.context() as other_machine:
        other_machine.setattr(claims_module, "_process_space", lambda: "another boot, other processes")
        return Claims(tmp_path, "elsewhere")


def shift(path: Path, seconds: float) -> None:
    """Change the time of a heartbeat."""
    changed_ns = path.stat().st_mtime_ns + round(seconds * 1e9)
    os.utime(path, ns=(changed_ns, changed_ns))


def change(path: Path, **facts: Any) -> None:
    """Change what a claim says, but not the time of its heartbeat."""
    touched_ns = path.stat().st_mtime_ns
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    os.utime(path, ns=(touched_ns, touched_ns))


def during_the_look(claims: Claims, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have others do something after `claims` has found a claim free, before it takes it."""

    def is_free(*_: Any) -> bool:
        act()
        return True

    monkeypatch.setattr(claims, "_is_free", is_free)


# One process


def test_a_claim_belongs_to_one_worker(tmp_path: Path) -> None:
    one = Claims(tmp_path / "claims", "one")
    other = Claims(tmp_path / "claims", "other")
    claim = one.take(3)
    assert claim is not None
    assert (claim.key, claim.taken_from) == (3, None)
    assert one.take(3) is None
    assert other.take(3) is None
    assert other.take(33) is not None
    assert not one.is_lost(3)
    one.release(3)
    again = other.take(3)
    assert again is not None
    assert again.taken_from is None


def test_claims_leave_few_files(tmp_path: Path) -> None:
    claims = Claims(tmp_path, "one")
    for _ in range(30):
        assert claims.take(0) is not None
        claims.release(0)
    assert len(list(tmp_path.iterdir())) < 10


def test_a_killed_worker_loses_its_claim_at_once(tmp_path: Path) -> None:
    other = Claims(tmp_path, "other")
    with started_python("-c", HOLDS_ONE, str(tmp_path), str(LOST_S)) as started:
        started.wait_for_output("taken", timeout=30)
        assert other.take(0) is None
        started.process.kill()
        started.process.wait()
        claim = other.take(0)
    assert claim is not None
    assert f"worker the first (process {started.process.pid} on " in str(claim.taken_from)


def test_a_zombie_has_no_claim(tmp_path: Path) -> None:
    """A worker that was killed, and whose parent doesn't wait for it, as the first process of some containers."""
    other = Claims(tmp_path, "other")
    with started_python("-c", HOLDS_ONE, str(tmp_path), str(LOST_S)) as started:
        started.wait_for_output("taken", timeout=30)
        started.process.kill()
        deadline = time.monotonic() + 30
        while other.take(0) is None:
            assert time.monotonic() < deadline


def test_a_process_with_the_same_id_is_another_one(tmp_path: Path) -> None:
    claims = Claims(tmp_path, "one")
    assert claims.take(0) is not None
    change(tmp_path / "0.1", started=5)
    assert Claims(tmp_path, "other").take(0) is not None
    assert claims.is_lost(0)


@pytest.mark.parametrize("pid", [-1, 0, True, "1", None, 2**70])
def test_a_wrong_process_id_tells_nothing(tmp_path: Path, pid: Any) -> None:
    assert Claims(tmp_path, "one").take(0) is not None
    change(tmp_path / "0.1", pid=pid)
    assert Claims(tmp_path, "other").take(0) is None


# Heartbeats


def test_a_silent_worker_elsewhere_loses_its_claim(tmp_path: Path, elsewhere: Claims, clock: Clock) -> None:
    here = Claims(tmp_path, "here")
    assert elsewhere.take(0) is not None
    shift(tmp_path / "0.1", 2 - LOST_S)
    assert here.take(0) is None
    clock.now_s += 10 * LOST_S
    assert here.take(0) is None
    shift(tmp_path / "0.1", -4)
    assert here.take(0) is None
    clock.now_s += 0.9 * SECOND_LOOK_S
    assert here.take(0) is None
    assert not elsewhere.is_lost(0)
    clock.now_s += 0.1 * SECOND_LOOK_S
    claim = here.take(0)
    assert claim is not None
    assert "elsewhere" in str(claim.taken_from)
    assert elsewhere.is_lost(0)


def test_a_pause_of_all_workers_costs_no_claim(tmp_path: Path, elsewhere: Claims, clock: Clock) -> None:
    """As when the disk's server is away, or the machine sleeps: each beats soon after it."""
    here = Claims(tmp_path, "here")
    assert elsewhere.take(0) is not None
    shift(tmp_path / "0.1", -10 * LOST_S)
    assert here.take(0) is None
    assert elsewhere.beat() is None
    clock.now_s += SECOND_LOOK_S
    assert here.take(0) is None


@pytest.mark.parametrize("hours", [-5, 5])
def test_the_clock_of_the_disk_may_be_set(tmp_path: Path, elsewhere: Claims, clock: Clock, hours: int) -> None:
    """The next heartbeat has the new time."""
    here = Claims(tmp_path, "here")
    assert elsewhere.take(0) is not None
    shift(tmp_path / "0.1", 3600 * hours)
    assert here.take(0) is None
    elsewhere.beat()
    clock.now_s += 2 * LOST_S
    assert here.take(0) is None
    shift(tmp_path / "0.1", 3600 * hours)
    assert here.take(0) is None
    clock.now_s += SECOND_LOOK_S
    assert here.take(0) is not None


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "\0" * 100, "[" * 4000])
def test_a_damaged_claim_is_free_once_it_is_silent(tmp_path: Path, clock: Clock, content: str) -> None:
    here = Claims(tmp_path, "here")
    (tmp_path / "0.1").write_text(content)
    shift(tmp_path / "0.1", 2 - LOST_S)
    assert here.take(0) is None
    clock.now_s += LOST_S
    assert here.take(0) is None
    shift(tmp_path / "0.1", -4)
    assert here.take(0) is None
    clock.now_s += SECOND_LOOK_S
    assert here.take(0) is not None


def test_an_empty_claim_is_soon_free(tmp_path: Path, clock: Clock) -> None:
    """Its worker was killed after it had created the file, before it had written to it."""
    here = Claims(tmp_path, "here")
    (tmp_path / "0.1").touch()
    assert here.take(0) is None
    shift(tmp_path / "0.1", -0.04 * LOST_S)
    assert here.take(0) is None
    clock.now_s += 0.04 * SECOND_LOOK_S
    assert here.take(0) is not None


def test_a_failing_heartbeat_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "claims"
    claims = Claims(folder, "one")
    assert claims.take(0) is not None

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as full:
            full.setattr(os, "utime", fail)
            assert "No space left on device. After 60 s, other workers" in str(claims.beat())
            assert claims.beat() is None
        assert claims.beat() is None

    # The disk is away, so nothing is known.
    folder.rename(tmp_path / "away")
    assert f"{folder} isn't there" in str(claims.beat())
    assert not claims.is_lost(0)
    (tmp_path / "away").rename(folder)
    assert claims.beat() is None
    assert not claims.is_lost(0)


def test_a_full_disk_leaves_no_claim(tmp_path: Path) -> None:
    claims = Claims(tmp_path, "one")
    with full_at(10), pytest.raises(DiskError, match=f"{tmp_path} can't be used: File too large"):
        claims.take(0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DiskError, match="can't be created"):
        Claims(Path("/proc/claims"), "one")


# Races


def test_two_workers_never_both_take_over_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen it dead; one is slower."""
    Claims(tmp_path, "dead").take(0)
    change(tmp_path / "0.1", started=5)
    fast = Claims(tmp_path, "fast")
    slow = Claims(tmp_path, "slow")
    during_the_look(slow, lambda: fast.take(0), monkeypatch)
    assert slow.take(0) is None
    assert fast.beat() is None
    assert not fast.is_lost(0)


def test_a_worker_that_was_suspended_before_taking_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim had so many owners meanwhile that the file which it is about to create is gone again."""
    Claims(tmp_path, "dead").take(0)
    change(tmp_path / "0.1", started=5)
    fast = Claims(tmp_path, "fast")
    slow = Claims(tmp_path, "slow")

    def be_taken_often() -> None:
        for _ in range(20):
            assert fast.take(0) is not None
            fast.release(0)
        assert fast.take(0) is not None

    during_the_look(slow, be_taken_often, monkeypatch)
    assert slow.take(0) is None
    assert not fast.is_lost(0)
    assert Claims(tmp_path, "third").take(0) is None
    assert not (tmp_path / "0.2").exists()


def test_a_claim_lost_long_ago_is_known_to_be_lost(tmp_path: Path) -> None:
    """Of the many that had it since, the first ones have left no trace."""
    first = Claims(tmp_path, "first")
    assert first.take(0) is not None
    change(tmp_path / "0.1", started=5)
    other = Claims(tmp_path, "other")
    for _ in range(20):
        assert other.take(0) is not None
        assert first.is_lost(0)
        other.release(0)
        assert first.is_lost(0)
    assert other.take(0) is not None
    assert first.beat() is None
    first.release(0)
    assert not other.is_lost(0)
    assert Claims(tmp_path, "third").take(0) is None


def test_a_worker_that_was_suspended_while_taking_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Another worker saw its claim empty for too long."""
    fast = Claims(tmp_path, "fast")
    slow = Claims(tmp_path, "slow")

    def create_slowly(path: Path) -> bool:
        path.touch()
        shift(path, -LOST_S)
        assert fast.take(0) is None
        clock.now_s += LOST_S
        assert fast.take(0) is not None
        return True

    monkeypatch.setattr(slow, "_create", create_slowly)
    assert slow.take(0) is None
    assert not fast.is_lost(0)
    assert Claims(tmp_path, "third").take(0) is None


@pytest.mark.multiproc
def test_each_trial_is_completed_once_though_workers_are_killed(tmp_path: Path) -> None:
    own = random.Random(0)
    for name in ("done", "running"):
        (tmp_path / name).mkdir()

    with ExitStack() as stack:
        started: list[Started] = []

        def start() -> Started:
            program = started_python("-c", COMPLETES_TRIALS, str(tmp_path), str(len(started)))
            started.append(stack.enter_context(program))
            return started[-1]

        workers = [start() for _ in range(4)]
        num_killed = 0
        deadline = time.monotonic() + 60
        while any(worker.process.poll() is None for worker in workers):
            assert time.monotonic() < deadline, workers[0].printed()
            time.sleep(own.uniform(0, 0.1))
            index = own.randrange(4)
            num_done = len(list((tmp_path / "done").iterdir()))
            # Not while all of them are starting.
            if num_done > 15 * num_killed and workers[index].process.poll() is None:
                workers[index].process.kill()
                num_killed += 1
                workers[index] = start()
        for worker in workers:
            assert worker.process.returncode == 0, worker.printed()
    assert num_killed >= 5
    numbers = [int(record.name.partition(".")[0]) for record in (tmp_path / "done").iterdir()]
    assert sorted(numbers) == list(range(200))


@pytest.mark.multiproc
def test_a_suspended_worker_finds_its_claim_lost(tmp_path: Path) -> None:
    lost_s = 2.0
    other = Claims(tmp_path, "other", lost_s=lost_s)
    with started_python("-c", HOLDS_ONE, str(tmp_path), str(lost_s)) as started:
        started.wait_for_output("taken", timeout=30)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 1.2 * lost_s:
            assert other.take(0) is None
            time.sleep(0.05)
        started.process.send_signal(signal.SIGSTOP)
        while other.take(0) is None:
            assert time.monotonic() < began_s + 30
            time.sleep(0.05)
        started.process.send_signal(signal.SIGCONT)
        started.wait_for_output("lost", timeout=30)
        assert started.wait(timeout=30) == 0
    # Its release has changed nothing.
    assert not other.is_lost(0)
    assert Claims(tmp_path, "third").take(0) is None


# Exclusive access


@pytest.mark.multiproc
def test_processes_enter_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")

    def count() -> None:
        assert run_python("-c", COUNTS, str(tmp_path)).returncode == 0

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "number").read_text() == "120"


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Claims, "_is_free", lambda *_: False)
    message = f"{tmp_path} has been in use by other processes for 0 s"
    with exclusive(tmp_path), pytest.raises(RunError, match=message):
        exclusive(tmp_path, lost_s=0.05).__enter__()
    monkeypatch.undo()
    with exclusive(tmp_path):
        pass
