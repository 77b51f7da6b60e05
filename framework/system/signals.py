"""Signals as something to wait for with `select`, among other events."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a run to stop."""


@final
class Signals:
    """Signals that have arrived and weren't taken yet. `select` sees when there are any."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._arrived: list[int] = []

    def fileno(self) -> int:
        return self._end.fileno()

    def take(self) -> list[int]:
        """Return the signals that have arrived, the oldest first."""
        with suppress(BlockingIOError):
            self._end.recv(4096)
        arrived, self._arrived = self._arrived, []  # after reading: a signal that arrives meanwhile is kept
        return arrived

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The handler."""
        self._arrived.append(number)


@contextmanager
def catching_signals(wanted: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[Signals]:
    """While this is entered, these signals are collected instead of interrupting. Main thread only.

    Ignored signals (`nohup` ignores SIGHUP) stay ignored.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signals = Signals(ours)
    numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, signals.note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        ours.close()
        theirs.close()
