"""Stopping on request: every rank after the same optimizer step, agreed on without a collective and without waiting.

A signal to any process of the run ends up as a number in the status of every rank (`RankStatus.stop_signal`): the
monitor writes it there, or the rank's own handler if no launcher monitors the rank. Needs no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from framework.distributed.store import RunStore
from framework.launch.plan import MonitorLink
from framework.system.signals import STOP_SIGNALS

# Steps until all ranks stop, if gradients are exchanged in every step or one step late. See `StopRequest`.
STEPS_TO_STOP = 2

Handler = Callable[[int, FrameType | None], None]


@final
class StopRequest:
    """The request to stop as one rank sees it. `pending` is read after every step, `due` is asked only if it is true.

    How the ranks agree: each rank that sees the request counts itself in the store, once, between two steps. The last
    one, with `s` steps done, decides that all stop after step K = s + 2, and continues once the store has K; the others
    look for K between steps. No rank waits: all train until K is known.

    Why all of them stop at K: an optimizer step needs the gradients of every rank. While the deciding rank has done s
    steps, no rank has finished more than s, or s + 1 under a strategy that uses gradients one step late; and no rank
    finishes step K before the deciding rank has begun K, or K - 1, which it does after deciding. So no rank is past K
    when it is decided, and after step K every rank finds it in the store. A GPU's work is only queued when Python comes
    to the end of a step, so devices must be synchronized before `due`. This holds for every strategy that exchanges
    gradients in every step. Under another one K is the next step in which all ranks wait for each other, which they do
    after deciding: no rank has ended that step before.
    """

    def __init__(self, link: MonitorLink, *, world_size: int) -> None:
        self._rank_status = link.rank_status
        self._open_store = link.open_store
        self._world_size = world_size
        self._run_store: RunStore | None = None
        self._stop_step: int | None = None

    @property
    def pending(self) -> bool:
        """True if this rank knows of a request. Costs one read of memory."""
        return self._rank_status.stop_signal != 0

    @property
    def signal_name(self) -> str:
        """The signal that requested it: `SIGTERM`, or `Ctrl-C`."""
        return shown_signal(self._rank_status.stop_signal)

    def due(self, step: int, *, steps_ahead: int = STEPS_TO_STOP) -> bool:
        """Return True if all ranks stop now, after `step` optimizer steps. A single rank stops at once.

        Call it between any two steps while the request is pending and training continues, after synchronizing this
        rank's devices. Raises torch's DistError, a RuntimeError, if the store is gone.

        Args:
            steps_ahead: after how many more steps every rank will have waited for every other.
        """
        if self._world_size == 1:
            return True
        # This rank counts itself once.
        if self._run_store is None:
            assert self._open_store is not None, "several ranks have a store"
            self._run_store = self._open_store()
            if self._run_store.add("stop/count", 1) == self._world_size:
                self._stop_step = step + steps_ahead
                self._run_store.set("stop/step", self._stop_step)
        if self._stop_step is None:
            self._stop_step = self._run_store.get("stop/step")
        assert self._stop_step is None or step <= self._stop_step, "a step was done without this rank's gradients"
        return step == self._stop_step


@contextmanager
def stoppable(link: MonitorLink) -> Iterator[None]:
    """Let this rank be asked to stop, by its launcher or by a signal, while the block runs.

    A rank that a launcher monitors passes signals on to it. Any other handles them itself, except Ctrl-C, which stays
    a KeyboardInterrupt: the process may be at a debugger's prompt. Ignored signals stay ignored, handlers are restored,
    and none are installed outside of the main thread.
    """
    rank_status = link.rank_status
    is_watched = link.is_watched
    numbers = [number for number in STOP_SIGNALS if is_watched or number != signal.SIGINT]

    def request(number: int, _frame: FrameType | None) -> None:
        if is_watched:
            rank_status.request_stop(number)
        elif not rank_status.stop_signal:
            rank_status.set_stop_signal(number)
            text = f"{shown_signal(number)}: saving after this step, then stopping. Ctrl-C ends at once.\n"
            # A handler must not print: it may have interrupted a print.
            os.write(2, text.encode())

    with _handled(numbers, request):
        rank_status.set_stoppable(True)
        try:
            yield
        finally:
            rank_status.set_stoppable(False)


@contextmanager
def interrupting() -> Iterator[None]:
    """While this is entered, the stop signals end this process as Ctrl-C does, instead of killing it."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled([number for number in STOP_SIGNALS if number != signal.SIGINT], interrupt):
        yield


def shown_signal(signal_number: int) -> str:
    """Return the name of a signal for messages."""
    return "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Have `handler` called on these signals, except those that are ignored or that C code handles."""
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
