"""Signals as something to wait for with `select`, among other events."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a run to stop."""


@final
class Signals:
    """Signals that have come and weren't taken yet; readable when there are any."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._come: list[int] = []

    def fileno(self) -> int:
        return self._end.fileno()

    def take(self) -> list[int]:
        """All that have come, the oldest first."""
        with suppress(BlockingIOError):
            self._end.recv(4096)
        come, self._come = self._come, []  # in this order: none that comes meanwhile is lost
        return come

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The handler."""
        self._come.append(number)


@contextmanager
def heeded() -> Iterator[Signals]:
    """While this is entered, `STOP_SIGNALS` interrupt nothing and are given out instead. Main thread only.

    One that is ignored (`nohup` has SIGHUP ignored) stays so.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signals = Signals(ours)
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
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
