"""A rank's status in shared memory: it survives the rank's death, and answers with the stacks of a rank that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.command import ROOT
from tests.helpers.internals import (
    STACKS_SIGNAL,
    Limits,
    NodeMonitor,
    RankInfo,
    RankPhase,
    RankStatus,
    heartbeat,
    main_stack,
    rank_status_module,
)

WAIT_S = 60.0


@pytest.fixture
def rank_status() -> Iterator[RankStatus]:
    made = RankStatus()
    yield made
    made.close()


@pytest.fixture
def reader(rank_status: RankStatus) -> Iterator[RankStatus]:
    """Return another view of the same memory."""
    made = RankStatus.of_process(os.getpid(), rank_status.fd)
    yield made
    made.close()


@contextmanager
def program(code: str) -> Iterator[tuple[subprocess.Popen[bytes], RankStatus]]:
    """A process that has a `rank_status` and runs `code`."""
    reader = RankStatus()
    begin = "import time\nfrom tests.helpers.internals import RankPhase, RankStatus\n"
    begin += f"rank_status = RankStatus({reader.fd})\nrank_status.register()\n"
    process = subprocess.Popen([sys.executable, "-c", begin + code], pass_fds=[reader.fd], cwd=ROOT)
    try:
        yield process, reader
    finally:
        process.kill()
        process.wait()
        reader.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_rank_says_is_read(rank_status: RankStatus, reader: RankStatus) -> None:
    status = reader.read()
    assert status.phase == RankPhase.STARTING
    assert status.step == 0
    assert status.collectives == 0
    assert status.received_signal == 0
    assert status.pid == 0
    assert status.is_done == 0
    assert reader.failure() is None
    assert reader.stacks() == ""
    rank_status.set_phase(RankPhase.BACKWARD)
    rank_status.finish_step(12)
    rank_status.beat(34)
    rank_status.set_stoppable(True)
    rank_status.request_stop(signal.SIGTERM)
    reader.set_stop_signal(signal.SIGUSR1)
    rank_status.mark_done()
    status = reader.read()
    assert (RankPhase(status.phase).label, status.step, status.collectives) == ("backward", 12, 34)
    assert (status.is_stoppable, status.received_signal, rank_status.stop_signal) == (
        True,
        signal.SIGTERM,
        signal.SIGUSR1,
    )
    assert status.is_done


def test_it_survives_sigkill() -> None:
    code = "rank_status.set_phase(RankPhase.DATA); rank_status.finish_step(7)\n"
    code += "rank_status.record_failure({'exception': 'größer \\ud800'}); time.sleep(300)"
    with program(code) as (process, reader):
        wait_for(reader.failure)
        process.kill()
        process.wait()
        status = reader.read()
        assert (status.pid, status.phase, status.step) == (process.pid, RankPhase.DATA, 7)
        assert reader.failure() == {"exception": "größer \ud800"}


def test_a_long_record_loses_its_middle(rank_status: RankStatus, reader: RankStatus) -> None:
    """One letter takes up to twelve bytes in JSON."""
    for letter, size in (("x", 70_000), ("\U0001f389", 30_000)):
        text = f"begin {letter * size} end"
        rank_status.record_failure({"exception": text, "traceback": text, "time": 1.5})
        record = reader.failure()
        assert record is not None
        assert record["time"] == 1.5
        for said in (record["exception"], record["traceback"]):
            assert said.startswith(f"begin {letter}")
            assert said.endswith(f"{letter} end")
            assert "\n[…]\n" in said
            assert len(said) > 2000
        # The file hasn't overflowed.
        assert reader.stacks_size() == 0


WAITS_BESIDE_THREADS = """
import threading
def stand_still(): time.sleep(300)
for _ in range(3): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
rank_status.finish_step(1)
stand_still()
"""


def test_a_thread_waiting_in_c_has_a_stack() -> None:
    with program(WAITS_BESIDE_THREADS) as (process, reader):
        wait_for(lambda: reader.read().step)

        def asked() -> bool:
            os.kill(process.pid, STACKS_SIGNAL)
            time.sleep(0.05)
            return any("stand_still" in line for line in main_stack(reader.stacks()))

        wait_for(asked)
        assert process.poll() is None


def test_asking_for_stacks_spares_a_leaving_process() -> None:
    say = "with open('/proc/self/comm', 'w') as file: file.write('closed')"
    code = f"rank_status.mark_done()\nrank_status.close()\n{say}\ntime.sleep(300)"
    with program(code) as (process, _):
        wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "closed\n")
        process.send_signal(STACKS_SIGNAL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == -signal.SIGTERM


def test_the_heartbeat_counts_collectives_and_never_goes_back(
    rank_status: RankStatus, reader: RankStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_status_module, "HEARTBEAT_S", 0.02)

    def count() -> int:
        for _ in range(2):
            # The second heartbeat began after this call.
            before = reader.read().beat_ns
            wait_for(lambda before=before: reader.read().beat_ns > before)  # type: ignore[misc]
        return reader.read().collectives

    with heartbeat(rank_status):
        assert count() == 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            before = count()
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
            assert count() == before + 3
        finally:
            dist.destroy_process_group()
        assert count() == before + 3


def test_a_monitor_in_the_rank_needs_no_signal(rank_status: RankStatus, tmp_path: Path) -> None:
    signals: list[int] = []
    rank_status.register()
    before = signal.signal(STACKS_SIGNAL, lambda number, _: signals.append(number))
    monitor = NodeMonitor(node=0, limits=Limits(60.0, 60.0, 60.0), own=rank_status)
    try:
        info = RankInfo(0, 0, "CPU", log=str(tmp_path / "rank_0.log"))
        monitor.add(info, RankStatus.of_process(os.getpid(), rank_status.fd))
        (rank,) = monitor.statement({})["ranks"]
    finally:
        monitor.close()
        signal.signal(STACKS_SIGNAL, before)
    assert "test_a_monitor_in_the_rank_needs_no_signal" in rank["stacks"]
    assert not signals
