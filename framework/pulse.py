"""Where a rank stands, in memory that outlives it: written on the step path, read by who watches from outside.

The memory is an anonymous file: a page of 64-bit cells, then room for the record of a failure, then what faulthandler
writes when `STACKS_SIGNAL` arrives. The launcher makes it and hands it to the rank and to the watcher; a rank that
something else has started makes it, and whoever may look at the process opens /proc/PID/fd/FD. It stays readable after
the rank's death, and nothing of it is ever on a disk. Needs no torch. Linux; elsewhere nobody watches.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

STACKS_SIGNAL: int = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes a rank write the Python stacks of its threads. One that libraries and schedulers leave alone."""

COUNTED_GROUP = "counted with the default group"
"""Description of a process group whose collectives are counted in `Stand.collectives`, too."""

_PAGE_BYTES = mmap.PAGESIZE
_RECORD_BYTES = 65_536
_STACKS_AT = _PAGE_BYTES + _RECORD_BYTES
_MAX_STACK_BYTES = 65_536
_MAX_CHARS = 20_000  # of each text in a record that is too long; as often halved as it takes, for escapes are longer
_BEAT_NS, _PHASE, _STEP, _COLLECTIVES, _WISH, _ASKED, _STOPPABLE, _PID, _DONE, _RECORD = range(10)


class Phase(IntEnum):
    """What a rank is doing, in the order of its life."""

    STARTING = 0  # reading the configuration, building the data
    MEETING = 1  # waiting for the other ranks, to form the process group
    PREFLIGHT = 2  # checking what they exchange, where that is asked for
    COLLECTIVES = 3  # showing them: job=collectives
    BUILDING = 4  # model, optimizer, restoring a checkpoint
    DATA = 5
    FORWARD = 6
    BACKWARD = 7  # with the exchange of gradients
    OPTIMIZER = 8
    LOGGING = 9
    EVALUATE = 10
    CHECKPOINT = 11
    CLOSING = 12

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Stand:
    """What the page says. beat_s: of `time.monotonic()`, when the process last ran; 0 before it did.

    step: optimizer steps done, 0 until one was done in this process. collectives: how many the rank has begun, the same
    number on every rank that is at the same place; 0 before there is a process group. wish: the number of a signal that
    asked this rank to stop, 0 for none. is_stoppable: it would heed a wish to stop, at the end of a step. pid: 0 before
    it has started. is_done: its work is done, and it leaves with exit status `status`.
    """

    beat_s: float
    phase: Phase
    step: int
    collectives: int
    wish: int
    is_stoppable: bool
    pid: int
    is_done: bool
    status: int = 0


@final
class Pulse:
    """The rank's own side. A mark costs some hundred nanoseconds. `beat` is for its heartbeat thread, all else for the
    main thread."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: what `make_memory` gave, from now on the pulse's own; None makes one."""
        self.fd = make_memory() if fd is None else fd
        os.lseek(self.fd, _STACKS_AT, os.SEEK_SET)  # where faulthandler goes on writing
        self._page = mmap.mmap(self.fd, _PAGE_BYTES)
        self._cells = memoryview(self._page).cast("q")
        self.beat(0)

    def at(self, phase: Phase) -> None:
        """Say what is being done from here on."""
        self._cells[_PHASE] = phase

    def stepped(self, step: int) -> None:
        """Say that optimizer step `step`, counted from 1, is done."""
        self._cells[_STEP] = step

    @property
    def step(self) -> int:
        """The last step that `stepped` was given, 0 before the first."""
        return self._cells[_STEP]

    def beat(self, collectives: int) -> None:
        """Say that the process runs, and how many collectives it has begun."""
        self._cells[_COLLECTIVES] = collectives
        self._cells[_BEAT_NS] = time.monotonic_ns()

    def be_stoppable(self, stoppable: bool) -> None:
        """Say whether a wish to stop would be heeded at the end of a step."""
        self._cells[_STOPPABLE] = stoppable

    def wish_to_stop(self, signal_number: int) -> None:
        """Ask whoever watches to have all ranks stop together. May be called in a signal's handler."""
        self._cells[_WISH] = signal_number

    def ask_to_stop(self, signal_number: int) -> None:
        """What a watcher does from outside, for a rank that nobody watches."""
        self._cells[_ASKED] = signal_number

    @property
    def asked_to_stop(self) -> int:
        """The signal for which all ranks were asked to stop together, 0 for none."""
        return self._cells[_ASKED]

    def be_done(self, status: int = 0) -> None:
        """Say that this rank has done its work and leaves with this status: no exit status by itself says so surely."""
        self._cells[_DONE] = (status & 0xFF) + 1

    def fail(self, record: dict[str, Any]) -> None:
        """Leave what this rank raised; see `launch/worker.py` for its keys. A long traceback loses its middle.

        Raises ValueError for one that has no room even without its texts.
        """
        data, limit = json.dumps(record).encode(), _MAX_CHARS
        while len(data) > _RECORD_BYTES:
            if not limit:
                raise ValueError(f"The record of a failure has {len(data)} bytes without its texts.")
            data = json.dumps({key: _shortened(value, limit) for key, value in record.items()}).encode()
            limit //= 2
        os.pwrite(self.fd, data, _PAGE_BYTES)
        self._cells[_RECORD] = len(data)  # last: who reads it reads a whole record

    def be_seen(self) -> None:
        """Have `STACKS_SIGNAL` write the Python stacks of all threads, also of a main thread that waits in C++; then
        say which process this is, so that whoever watches may send it. Main thread only."""
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # what it goes back to after `close`: by default it kills
        faulthandler.register(STACKS_SIGNAL, file=self.fd, all_threads=True, chain=False)
        self._cells[_PID] = os.getpid()

    def close(self) -> None:
        """Give the memory back; who watches keeps what was there. `STACKS_SIGNAL` is ignored from now on."""
        faulthandler.unregister(STACKS_SIGNAL)
        self._cells.release()
        self._page.close()
        os.close(self.fd)


@final
class PulseReader:
    """A rank's memory as seen from another process of the same machine; what was last there stays after its death."""

    def __init__(self, fd: int) -> None:
        """fd: of `make_memory`, from now on the reader's own."""
        self._fd = fd
        self._page = mmap.mmap(fd, _PAGE_BYTES)
        self._cells = memoryview(self._page).cast("q")

    @staticmethod
    def of_process(pid: int, fd: int) -> PulseReader:
        """The memory that is file descriptor `fd` of `pid`. Raises OSError where that is gone, or may not be seen."""
        return PulseReader(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def read(self) -> Stand:
        cells = self._cells
        return Stand(
            beat_s=cells[_BEAT_NS] / 1e9,
            phase=Phase(cells[_PHASE]),
            step=cells[_STEP],
            collectives=cells[_COLLECTIVES],
            wish=cells[_WISH],
            is_stoppable=bool(cells[_STOPPABLE]),
            pid=cells[_PID],
            is_done=bool(cells[_DONE]),
            status=max(0, cells[_DONE] - 1),
        )

    def ask_to_stop(self, signal_number: int) -> None:
        """Tell the rank that all are asked to stop, and by which signal."""
        self._cells[_ASKED] = signal_number

    def failure(self) -> dict[str, Any] | None:
        """The record of what the rank raised; None where it left none."""
        size = self._cells[_RECORD]
        if not size:
            return None
        record: dict[str, Any] = json.loads(os.pread(self._fd, size, _PAGE_BYTES))
        return record

    def stacks_size(self) -> int:
        """Bytes of stacks written so far."""
        return os.fstat(self._fd).st_size - _STACKS_AT

    def stacks(self, since: int = 0) -> str:
        """What was written on `STACKS_SIGNAL` after the first `since` bytes, the last part of it; empty for nothing."""
        end = _STACKS_AT + self.stacks_size()
        begin = max(_STACKS_AT + since, end - _MAX_STACK_BYTES)
        return os.pread(self._fd, end - begin, begin).decode(errors="replace")

    def close(self) -> None:
        self._cells.release()
        self._page.close()
        os.close(self._fd)


def make_memory() -> int:
    """A file descriptor of new memory for a pulse; it is gone when nobody holds it any more."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("framework_pulse")
    else:
        fd, path = tempfile.mkstemp(prefix="framework_pulse")
        os.unlink(path)  # noqa: PTH108  # a file without a name
    os.ftruncate(fd, _STACKS_AT)
    return fd


def _shortened(value: Any, limit: int) -> Any:
    if not isinstance(value, str) or len(value) <= limit:
        return value
    half = limit // 2
    return f"{value[:half]}\n[…]\n{value[len(value) - half :]}"
