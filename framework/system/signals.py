"""Signals as something to wait for with `select`, among other events."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a run to stop."""


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
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) if numbers else None
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield Signals(ours, [*numbers, *observed])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if wakeup is not None:
            signal.set_wakeup_fd(wakeup)
        ours.close()
        theirs.close()
