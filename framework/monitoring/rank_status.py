"""A rank's status in memory that outlives it: written by the rank on the step path, read by the node's monitor.

The memory is an anonymous file: a `StatusPage`, then room for the record of a failure, then the stacks that
faulthandler writes on `STACKS_SIGNAL`. The launcher makes it and hands it to the rank and to the monitor; a rank that
torchrun or srun started makes it itself, and the monitors open /proc/PID/fd/FD. Needs no torch. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, NoReturn, final

from framework.distributed.store import COUNTED_GROUP
from framework.errors import LaunchError

# Makes a rank write the Python stacks of its threads. Libraries and schedulers don't use this signal.
# Without real-time signals (macOS), one that hardly any program uses, and that is ignored by default.
STACKS_SIGNAL: int = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGURG
# How faulthandler begins when a signal ends the process.
CRASH = "Fatal Python error: "
HEARTBEAT_S = 0.5

# Room for the page, then for the record of a failure, then for stacks. Memory is used only as it is written.
_PAGE_BYTES = mmap.PAGESIZE
_RECORD_BYTES = 1 << 20
_STACKS_AT = _PAGE_BYTES + _RECORD_BYTES
_MAX_STACK_BYTES = 65_536
# Of each text of a record. JSON may make twelve times as many bytes of it.
_MAX_CHARS = 20_000


class RankPhase(IntEnum):
    """What a rank is doing, in the order of its life."""

    # Reading the configuration, building the data.
    STARTING = 0
    # Waiting for the other ranks, to form the process group.
    MEETING = 1
    # Checking what the ranks exchange, if that is asked for.
    PREFLIGHT = 2
    # Building model and optimizer, restoring a checkpoint.
    BUILDING = 4
    DATA = 5
    FORWARD = 6
    # With the exchange of gradients.
    BACKWARD = 7
    OPTIMIZER = 8
    # Logging, and in the hooks of callbacks, loggers and the task.
    LOGGING = 9
    EVALUATE = 10
    CHECKPOINT = 11
    # In a user's function: job=package.module.function.
    FUNCTION = 12
    CLOSING = 13

    @property
    def label(self) -> str:
        return self.name.lower()


class StatusPage(ctypes.Structure):
    """What the rank writes and monitors read at any time."""

    _fields_ = (
        # The last heartbeat, in `time.monotonic_ns()`.
        ("beat_ns", ctypes.c_int64),
        # A RankPhase.
        ("phase", ctypes.c_int64),
        # Optimizer steps done; 0 until this process has done one.
        ("step", ctypes.c_int64),
        # Collectives begun so far, 0 before there is a process group. A rank that is behind has begun fewer.
        ("collectives", ctypes.c_int64),
        # The signal that this rank received, 0 for none.
        ("received_signal", ctypes.c_int64),
        # The signal for which all ranks are to stop together, 0 for none.
        ("stop_signal", ctypes.c_int64),
        # If the rank would stop at the end of a step.
        ("is_stoppable", ctypes.c_int64),
        # 0 before the process has started.
        ("pid", ctypes.c_int64),
        # If its work is done, so that it only has to leave.
        ("is_done", ctypes.c_int64),
        # The size of the record of a failure, 0 for none.
        ("record_bytes", ctypes.c_int64),
        # If everything is closed after a failure, so that the rank only has to leave.
        ("is_closed", ctypes.c_int64),
        # Signs of progress within a phase.
        ("ticks", ctypes.c_int64),
        # The optimizer steps of the whole run, 0 if that isn't known.
        ("total_steps", ctypes.c_int64),
        # The number of the last validation of the run, 0 before this process has done one, and what it gave for
        # checkpoint.monitor.
        ("validations", ctypes.c_int64),
        ("validated_value", ctypes.c_double),
        # If the rank can dump its collectives, if the monitor wants it to, and if it has.
        ("can_dump", ctypes.c_int64),
        ("is_dump_wanted", ctypes.c_int64),
        ("is_dumped", ctypes.c_int64),
    )


@final
class RankStatus:
    """A rank's status, which survives the rank's death.

    On the step path a write costs some hundred nanoseconds. `beat` is for the heartbeat, all else for the main thread.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Use the memory of another RankStatus, whose `fd` this one will close; None makes new memory.

        The memory is freed when no process holds it. A child that inherits `fd` can make a RankStatus of it.
        """
        if fd is None:
            fd = _new_memory()
            _extend(fd, _STACKS_AT)
            # faulthandler writes at the file's position.
            os.lseek(fd, _STACKS_AT, os.SEEK_SET)
        self.fd = fd
        self._memory = mmap.mmap(self.fd, _PAGE_BYTES)
        self._page = StatusPage.from_buffer(self._memory)
        self._is_registered = False
        self._dump: Callable[[], None] | None = None
        self._dumping = threading.Lock()

    @staticmethod
    def of_process(pid: int, fd: int) -> RankStatus:
        """Open file descriptor `fd` of process `pid`. Raises OSError if it is gone or may not be opened."""
        return RankStatus(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    # For the rank

    def set_phase(self, phase: RankPhase) -> None:
        """Set what this rank is doing from now on."""
        self._page.phase = phase

    def finish_step(self, step: int) -> None:
        """Mark optimizer step `step`, counted from 1, as done."""
        self._page.step = step

    def set_total_steps(self, steps: int) -> None:
        """Set how many optimizer steps the whole run has; 0 if that isn't known."""
        self._page.total_steps = steps

    def set_validation(self, number: int, value: float) -> None:
        """Set what validation `number` of the run, counted from 1, gave for the monitored metric."""
        self._page.validated_value = value
        # A reader may see the new value with the earlier number, but never an earlier value with the new number.
        self._page.validations = number

    def tick(self) -> None:
        """Show progress within a phase, such as a batch that is evaluated."""
        self._page.ticks += 1

    def beat(self, collectives: int) -> None:
        """Show that the process runs, and how many collectives it has begun."""
        self._page.collectives = collectives
        self._page.beat_ns = time.monotonic_ns()

    def set_stoppable(self, stoppable: bool) -> None:
        """Set if the rank would stop at the end of a step when asked to."""
        self._page.is_stoppable = stoppable

    def request_stop(self, signal_number: int) -> None:
        """Pass on the signal that this rank received: all ranks are to stop. Safe in a signal handler."""
        self._page.received_signal = signal_number

    def set_stop_signal(self, signal_number: int) -> None:
        """Tell the rank that all ranks are to stop, and by which signal: by the monitor, or by a rank without one."""
        self._page.stop_signal = signal_number

    @property
    def stop_signal(self) -> int:
        """The signal for which all ranks are to stop together, 0 for none."""
        return int(self._page.stop_signal)

    def mark_done(self) -> None:
        """Mark this rank's work as done. Exit status 0 alone could also come from an early `os._exit(0)`."""
        self._page.is_done = True

    def mark_closed(self) -> None:
        """After a recorded failure: mark what this rank had opened as closed."""
        self._page.is_closed = True

    def record_failure(self, record: dict[str, Any]) -> None:
        """Write what this rank raised; see `launch/worker.py` for the keys. Long texts lose their middle."""
        data = json.dumps({key: _shortened(value) for key, value in record.items()}).encode()
        os.pwrite(self.fd, data, _PAGE_BYTES)
        # The size comes last, so that a reader sees all of the record or nothing.
        self._page.record_bytes = len(data)

    def set_dump(self, dump: Callable[[], None]) -> None:
        """Set what dumps the collectives that this rank has begun. It may be called in a thread."""
        self._dump = dump
        self._page.can_dump = True

    def dump_collectives(self) -> None:
        """Dump the collectives that this rank has begun, unless it has no peers or has done it already."""
        with self._dumping:
            if self._dump is None or self._page.is_dumped:
                return
            try:
                self._dump()
            except Exception as error:
                # A full disk, or what torch's recorder raises: there is another failure to report, and this is for it.
                logging.getLogger("framework").warning("The collectives of this rank can't be dumped: %s", error)
            self._page.is_dumped = True

    def register(self) -> None:
        """Have `STACKS_SIGNAL` write the stacks of all threads, even if the main thread waits in C++. Main thread only.

        Sets the pid last: from then on the monitor may send the signal.
        """
        # `close` restores this handler; the default one would kill the process.
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACKS_SIGNAL, file=self.fd, all_threads=True, chain=False)
        self._is_registered = True
        os.register_at_fork(after_in_child=partial(_disown, weakref.ref(self)))
        self.beat(0)
        self._page.pid = os.getpid()

    def write_stacks(self) -> None:
        """Write the stacks of this process's threads, as `STACKS_SIGNAL` does.

        For a thread of the rank itself: while it runs Python, the signal's handler would read its frames as they
        change, and crash now and then (CPython 3.11: 4 of 55 reports).
        """
        faulthandler.dump_traceback(self.fd, all_threads=True)

    # For its node's monitor

    def read(self) -> StatusPage:
        """Return a copy of the page."""
        return StatusPage.from_buffer_copy(self._memory)

    def request_dump(self) -> None:
        """Have the rank dump the collectives that it has begun, within `HEARTBEAT_S` if it can."""
        self._page.is_dump_wanted = True

    def failure(self) -> dict[str, Any] | None:
        """Return the record of what the rank raised, or None."""
        size = self._page.record_bytes
        if size == 0:
            return None
        record: dict[str, Any] = json.loads(os.pread(self.fd, size, _PAGE_BYTES))
        return record

    def stacks_size(self) -> int:
        """Return how many bytes of stacks were written so far."""
        return os.fstat(self.fd).st_size - _STACKS_AT

    def stacks(self, since: int = 0) -> str:
        """Return the end of the stacks that were written after the first `since` bytes, "" for none."""
        end = _STACKS_AT + self.stacks_size()
        begin = max(_STACKS_AT + since, end - _MAX_STACK_BYTES)
        return os.pread(self.fd, end - begin, begin).decode(errors="replace")

    def close(self) -> None:
        """Release the memory; others keep it. `STACKS_SIGNAL` is ignored from now on by a rank that had registered."""
        if self._is_registered:
            faulthandler.unregister(STACKS_SIGNAL)
        del self._page
        self._memory.close()
        os.close(self.fd)


@final
class _PageOfACopy:
    """Replaces the page in a process that a rank has forked. It is used only if the copy returns to the framework.

    The copy would write the same logs and checkpoints as the rank, so it is ended. This costs the rank nothing.
    """

    def __getattr__(self, _name: str) -> NoReturn:
        self._leave()

    def __setattr__(self, name: str, _value: object) -> None:
        # An error that leaves the copy's own code is reported as such, once it has passed `stoppable`.
        if name != "is_stoppable":
            self._leave()

    def _leave(self) -> NoReturn:
        text = (
            f"pid {os.getpid()} is a copy of this rank, made by os.fork(), that returned to the framework: ended. "
            "In the child of os.fork(), end with os._exit().\n"
        )
        os.write(2, text.encode())
        os._exit(1)


def _disown(reference: weakref.ref[RankStatus]) -> None:
    rank_status = reference()
    if rank_status is not None:
        rank_status._page = _PageOfACopy()  # type: ignore[assignment]


@contextmanager
def heartbeat(rank_status: RankStatus) -> Iterator[None]:
    """Register this process, and beat twice a second, in a thread, while this is entered. Main thread only.

    The number of collectives separates those who wait from those they wait for: a rank in a collective has begun one
    more than a rank that hasn't come. If the process is stopped, or something holds the interpreter, beats stop.
    """
    ended = threading.Event()

    def beat() -> None:
        begun = 0
        while not ended.wait(HEARTBEAT_S):
            # `_collectives` is 0 again once the group is destroyed.
            begun = max(begun, _collectives())
            rank_status.beat(begun)
            if rank_status.read().is_dump_wanted:
                rank_status.dump_collectives()

    rank_status.register()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _collectives() -> int:
    """Return how many collectives this rank has begun in the default group and in those counted with it.

    0 without a group, or with one that doesn't count. All ranks begin collectives in the same order.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    c10d = distributed.distributed_c10d
    # A backend may not count, and the group may be destroyed at this moment by the main thread.
    try:
        groups = [c10d._get_default_group()]
        groups += [group for group in list(c10d._world.pg_map) if group.group_desc == COUNTED_GROUP]
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except (RuntimeError, ValueError):
        return 0


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _MAX_CHARS:
        return value
    half = _MAX_CHARS // 2
    return f"{value[:half]}\n[…]\n{value[len(value) - half :]}"


def _new_memory() -> int:
    """Return a file descriptor of memory that has no path; without memfd_create (macOS), of an unlinked file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("framework_rank_status")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _extend(fd: int, size_bytes: int) -> None:
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise LaunchError(
            f"The memory for a rank's status ({size_bytes:,} bytes) can't be created: {error.strerror}.\n"
            "A limit of file sizes counts for it, too: raise it with `ulimit -f`, or remove it."
        ) from error
