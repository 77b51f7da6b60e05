from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from framework.launch.report import main_stack
from framework.pulse import STACKS_SIGNAL, Phase, Pulse, PulseReader, make_memory
from tests.helpers.command import ROOT

WAIT_S = 30.0


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
    try:
        begin = f"from framework.pulse import *\npulse = Pulse({fd})\npulse.be_seen()\n"
        process = subprocess.Popen([sys.executable, "-c", begin + code], pass_fds=[fd], cwd=ROOT)
        reader = PulseReader(os.dup(fd))
        try:
            yield process, reader
        finally:
            process.kill()
            process.wait()
            reader.close()
    finally:
        os.close(fd)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_said_is_read(pulse: Pulse, reader: PulseReader) -> None:
    pulse.at(Phase.BACKWARD)
    pulse.stepped(12)
    pulse.beat(34)
    pulse.be_stoppable(True)
    pulse.wish_to_stop(signal.SIGTERM)
    reader.ask_to_stop(signal.SIGUSR1)
    stand = reader.read()
    assert (stand.phase, stand.phase.label, stand.step, stand.collectives) == (Phase.BACKWARD, "backward", 12, 34)
    assert (stand.is_stoppable, stand.wish, pulse.asked_to_stop) == (True, signal.SIGTERM, signal.SIGUSR1)
    assert 0.0 <= time.monotonic() - stand.beat_s < WAIT_S
    assert not stand.is_done
    pulse.be_done()
    assert reader.read().is_done


def test_a_new_pulse_says_nothing(reader: PulseReader) -> None:
    stand = reader.read()
    assert (stand.phase, stand.step, stand.collectives, stand.wish) == (Phase.STARTING, 0, 0, 0)
    assert stand.pid == 0  # nothing could answer a signal yet
    assert reader.failure() is None
    assert reader.stacks() == ""


def test_what_was_there_stays_after_sigkill() -> None:
    with program(
        "pulse.at(Phase.DATA); pulse.stepped(7); pulse.fail({'exception': 'no'})\nimport time; time.sleep(300)"
    ) as (
        process,
        reader,
    ):
        wait_for(reader.failure)
        process.kill()
        process.wait()
        stand = reader.read()
        assert (stand.pid, stand.phase, stand.step) == (process.pid, Phase.DATA, 7)
        assert reader.failure() == {"exception": "no"}


def test_what_can_not_be_opened_is_an_os_error() -> None:
    with program("pass") as (process, reader):
        process.wait()
        with pytest.raises(FileNotFoundError):
            PulseReader.of_process(process.pid, reader.read().step)


@pytest.mark.parametrize(
    ("letter", "size"), [("x", 70_000), ("x", 20_000), ("ä", 30_000), ("\U0001f389", 30_000), ("\0", 50_000)]
)
def test_a_record_longer_than_its_room_loses_its_middle(
    pulse: Pulse, reader: PulseReader, letter: str, size: int
) -> None:
    """In JSON one letter takes up to twelve bytes."""
    text = f"begin {letter * size} end"
    pulse.fail({"exception": text, "traceback": text, "time": 1.5})
    record = reader.failure()
    assert record is not None
    assert record["time"] == 1.5
    for said in (record["exception"], record["traceback"]):
        assert said.startswith(f"begin {letter}")
        assert said.endswith(f"{letter} end")
        assert len(said) > 2000
        assert said == text or "\n[…]\n" in said
    assert reader.stacks_size() == 0  # it hasn't run over


def test_a_record_without_room_even_without_its_texts_is_refused(pulse: Pulse, reader: PulseReader) -> None:
    with pytest.raises(ValueError, match="without its texts"):
        pulse.fail({"exception": "no" * 40_000, "numbers": list(range(70_000))})
    assert reader.failure() is None


def test_any_letters_survive(pulse: Pulse, reader: PulseReader) -> None:
    pulse.fail({"exception": "ValueError: größer als 𝛼, \ud800 alone"})
    assert reader.failure() == {"exception": "ValueError: größer als 𝛼, \ud800 alone"}


BLOCKED = {
    "a sleep": "import time\ndef stand_still(): time.sleep(300)\nstand_still()",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\n"
    "def stand_still(): lock.acquire()\nstand_still()",
    "a pipe": "import os\ndef stand_still(): os.read(os.pipe()[0], 1)\nstand_still()",
    "a sleep beside threads": "import threading, time\ndef stand_still(): time.sleep(300)\n"
    "for _ in range(3): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()\nstand_still()",
}


@pytest.mark.parametrize("how", BLOCKED)
def test_stacks_of_a_main_thread_that_waits_in_c(how: str) -> None:
    with program("pulse.stepped(1)\n" + BLOCKED[how]) as (process, reader):
        wait_for(lambda: reader.read().step)

        def asked() -> bool:
            os.kill(process.pid, STACKS_SIGNAL)
            time.sleep(0.05)
            return any("stand_still" in line for line in main_stack(reader.stacks()))

        wait_for(asked)
        assert process.poll() is None
        seen = reader.stacks_size()
        assert reader.stacks(seen) == ""
        os.kill(process.pid, STACKS_SIGNAL)
        wait_for(lambda: "stand_still" in reader.stacks(seen))


def test_stacks_of_a_stopped_process_once_it_is_continued() -> None:
    with program("pulse.stepped(1)\n" + BLOCKED["a sleep"]) as (process, reader):
        wait_for(lambda: reader.read().step)
        process.send_signal(signal.SIGSTOP)
        process.send_signal(STACKS_SIGNAL)
        time.sleep(0.2)
        assert reader.stacks() == ""
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: "stand_still" in reader.stacks() or "<module>" in reader.stacks())


def test_asking_for_stacks_never_ends_a_process() -> None:
    """Not before it is seen, since it has no number then, and not when it has closed its pulse and is leaving."""
    code = "import time\npulse.be_done()\npulse.close()\nprint('closed', flush=True)\ntime.sleep(300)"
    with program(code) as (process, reader):
        wait_for(lambda: reader.read().is_done)
        time.sleep(0.3)
        process.send_signal(STACKS_SIGNAL)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_without_memory_files_a_file_without_a_name_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pulse = Pulse()
    reader = PulseReader(os.dup(pulse.fd))
    pulse.stepped(3)
    assert reader.read().step == 3
    assert os.fstat(pulse.fd).st_nlink == 0
    reader.close()
    pulse.close()
