"""Signals: wait for them with `select`, among other events, or die with the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, final

from framework.errors import StoppedBySignalError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Those that ask a run to stop: Ctrl-C, a closed terminal's, and schedulers'. submitit has SLURM send SIGUSR2."""

SCHEDULER_SIGNALS = STOP_SIGNALS[1:]
"""Those that may come from something else than the user's keyboard."""

Handler = Callable[[int, FrameType | None], None]


@final
class Signals:
    """Signals that have arrived and weren't taken yet. `select` sees when there are any.

    Any thread may take them, also while the main thread waits in C++ and Python's handlers don't run.
    """

    def __init__(self, end: socket.socket, wanted: Sequence[int]) -> None:
        self._end = end
        self._wanted = wanted

    def fileno(self) -> int:
        return self._end.fileno()

    def take(self) -> list[int]:
        """Return the signals that have arrived, the oldest first."""
        with suppress(BlockingIOError):
            return [number for number in self._end.recv(4096) if number in self._wanted]
        return []


@contextmanager
def catching_signals(
    wanted: Sequence[signal.Signals] = STOP_SIGNALS, *, observed: Sequence[signal.Signals] = ()
) -> Iterator[Signals]:
    """While this is entered, these signals are collected instead of interrupting. Only the main thread can do that.

    Ignored signals (`nohup` ignores SIGHUP) stay ignored.

    Args:
        observed: Signals that are collected, and handled as before as well.
    """
    if threading.current_thread() is not threading.main_thread():
        wanted = ()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_wakeup_fd: int | None = None
    if numbers:
        # From now on, Python writes the number of each signal to this socket.
        earlier_wakeup_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    earlier_handlers = {number: signal.signal(number, _do_nothing) for number in numbers}
    try:
        yield Signals(ours, [*numbers, *observed])
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
        if earlier_wakeup_fd is not None:
            signal.set_wakeup_fd(earlier_wakeup_fd)
        ours.close()
        theirs.close()


@contextmanager
def handling_signals(numbers: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Have `handler` called on these signals, except those that are ignored or that C code handles.

    The main thread's alone; in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pid = os.getpid()
    before: dict[signal.Signals, Any] = {}
    for number in numbers:
        old_handler = signal.getsignal(number)
        if old_handler not in (None, signal.SIG_IGN):
            before[number] = old_handler

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            handler(number, frame)
            return
        # In a process that was forked meanwhile, the signal has its earlier effect.
        signal.signal(number, before[signal.Signals(number)])
        os.kill(os.getpid(), number)

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, old_handler in before.items():
            signal.signal(number, old_handler)


@contextmanager
def interrupting() -> Iterator[None]:
    """While this is entered, `SCHEDULER_SIGNALS` raise StoppedBySignalError instead of killing this process."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise StoppedBySignalError(shown_signal(number))

    with handling_signals(SCHEDULER_SIGNALS, interrupt):
        yield


def shown_signal(signal_number: int) -> str:
    """Return the name of a signal for messages: `SIGTERM`, or `Ctrl-C`."""
    return "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name


def _do_nothing(*_: object) -> None:
    """Handle a signal that is collected: its number has been written to the socket."""


_PR_SET_PDEATHSIG = 1
"""A number of prctl(2)."""


def die_with_parent(expected_parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; leave at once if it has ended already.

    `expected_parent` is the process id the caller was started by. Linux only: elsewhere nothing is asked for, and a
    closed socket is what tells the fork server. The request is dropped by fork(), so every child makes its own.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the request was made; then nothing would ever arrive.
    if os.getppid() != expected_parent:
        os._exit(1)
