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

from framework.launch import heartbeat
from framework.launch.report import main_stack
from framework.pulse import STACKS_SIGNAL, Phase, Pulse, PulseReader, make_memory
from tests.helpers.command import ROOT

WAIT_S = 60.0


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse()
    yield made
    made.close()


@pytest.fixture
def reader(pulse: Pulse) -> Iterator[PulseReader]:
    """Of the same memory."""
    made = PulseReader.of_process(os.getpid(), pulse.fd)
    yield made
    made.close()


@contextmanager
def program(code: str) -> Iterator[tuple[subprocess.Popen[bytes], PulseReader]]:
    """A process that has a `pulse` and runs `code`."""
    fd = make_memory()
    begin = f"import time\nfrom framework.pulse import *\npulse = Pulse({fd})\npulse.be_seen()\n"
    process = subprocess.Popen([sys.executable, "-c", begin + code], pass_fds=[fd], cwd=ROOT)
    reader = PulseReader(fd)
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


@pytest.mark.parametrize("memory_files", [True, False])
def test_what_a_rank_says_is_read(monkeypatch: pytest.MonkeyPatch, memory_files: bool) -> None:
    if not memory_files:
        monkeypatch.delattr(os, "memfd_create")
    pulse = Pulse()
    reader = PulseReader(os.dup(pulse.fd))
    stand = reader.read()
    assert (stand.phase, stand.step, stand.collectives, stand.wish) == (Phase.STARTING, 0, 0, 0)
    assert (stand.pid, stand.is_done, reader.failure(), reader.stacks()) == (0, False, None, "")
    pulse.at(Phase.BACKWARD)
    pulse.stepped(12)
    pulse.beat(34)
    pulse.be_stoppable(True)
    pulse.wish_to_stop(signal.SIGTERM)
    reader.ask_to_stop(signal.SIGUSR1)
    pulse.be_done(75)
    stand = reader.read()
    assert (stand.phase, stand.phase.label, stand.step, stand.collectives) == (Phase.BACKWARD, "backward", 12, 34)
    assert (stand.is_stoppable, stand.wish, pulse.asked_to_stop) == (True, signal.SIGTERM, signal.SIGUSR1)
    assert (stand.is_done, stand.status) == (True, 75)
    assert 0.0 <= time.monotonic() - stand.beat_s < WAIT_S
    reader.close()
    pulse.close()


def test_it_survives_sigkill() -> None:
    code = "pulse.at(Phase.DATA); pulse.stepped(7); pulse.fail({'exception': 'größer \\ud800'}); time.sleep(300)"
    with program(code) as (process, reader):
        wait_for(reader.failure)
        process.kill()
        process.wait()
        stand = reader.read()
        assert (stand.pid, stand.phase, stand.step) == (process.pid, Phase.DATA, 7)
        assert reader.failure() == {"exception": "größer \ud800"}


@pytest.mark.parametrize(("letter", "size"), [("x", 70_000), ("ä", 30_000), ("\U0001f389", 30_000), ("\0", 50_000)])
def test_a_record_that_is_too_long_loses_its_middle(pulse: Pulse, reader: PulseReader, letter: str, size: int) -> None:
    """In JSON one letter takes up to twelve bytes."""
    text = f"begin {letter * size} end"
    pulse.fail({"exception": text, "traceback": text, "time": 1.5})
    record = reader.failure()
    assert record is not None
    assert record["time"] == 1.5
    for said in (record["exception"], record["traceback"]):
        assert said.startswith(f"begin {letter}")
        assert said.endswith(f"{letter} end")
        assert "\n[…]\n" in said
        assert len(said) > 2000
    assert reader.stacks_size() == 0  # it hasn't run over
    with pytest.raises(ValueError, match="without its texts"):
        pulse.fail({"numbers": list(range(70_000))})


BLOCKED = {
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\ndef stand_still(): lock.acquire()\n",
    "a pipe": "import os\ndef stand_still(): os.read(os.pipe()[0], 1)\n",
    "a sleep beside threads": "import threading\ndef stand_still(): time.sleep(300)\n"
    "for _ in range(3): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n",
}


@pytest.mark.parametrize("how", BLOCKED)
def test_stacks_of_a_main_thread_that_waits_in_c(how: str) -> None:
    with program(f"{BLOCKED[how]}pulse.stepped(1)\nstand_still()") as (process, reader):
        wait_for(lambda: reader.read().step)

        def asked() -> bool:
            os.kill(process.pid, STACKS_SIGNAL)
            time.sleep(0.05)
            return any("stand_still" in line for line in main_stack(reader.stacks()))

        wait_for(asked)
        assert process.poll() is None


def test_asking_for_stacks_does_not_end_a_process_that_is_leaving() -> None:
    say = "with open('/proc/self/comm', 'w') as file: file.write('closed')"
    code = f"pulse.be_done()\npulse.close()\n{say}\ntime.sleep(300)"
    with program(code) as (process, _):
        wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "closed\n")
        process.send_signal(STACKS_SIGNAL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == -signal.SIGTERM


def test_the_heartbeat_counts_collectives_and_never_goes_back(
    pulse: Pulse, reader: PulseReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)

    def count() -> int:
        for _ in range(2):  # the second beat began after this call
            before = reader.read().beat_s
            wait_for(lambda before=before: reader.read().beat_s > before)  # type: ignore[misc]
        return reader.read().collectives

    with heartbeat.beating(pulse):
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
