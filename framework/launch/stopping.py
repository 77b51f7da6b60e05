"""Stopping on request: every rank after the same optimizer step, agreed on without a collective and without waiting.

A signal to any process of the run ends up as a number in every rank's page (`Pulse.asked_to_stop`): the watchers see to
that, and where nobody watches, the rank's own handler. Torch-free.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

from framework.launch.board import Board
from framework.launch.link import Link
from framework.launch.signals import STOP_SIGNALS

STEPS_TO_COME = 2
"""With gradients that are exchanged in every step, or one step late."""

Handler = Callable[[int, FrameType | None], None]


@final
class StopRequest:
    """The request to stop as one rank sees it. `pending` is looked at after every step, `due` asked only when it is.

    How they agree: each rank that sees the request counts itself on the board, once, between two steps. The last one,
    with `s` steps done, decides that all stop after step K = s + 2, and goes on when that is on the board for certain;
    the others look for K between steps. Nobody waits: ranks that know of the request train on until K is known.

    Why all of them stop at K: an optimizer step needs the gradients of every rank. While the decider has done s steps,
    nobody has finished more than s, or s + 1 under a strategy that uses gradients one step late; and nobody finishes
    step K before the decider has begun K, or K - 1, which it does after deciding. So nobody is past K when it is
    decided, and after step K every rank finds it on the board. A GPU's work is only queued when Python comes to the end
    of a step: therefore `due` may be asked only after the devices have been waited for. It holds for every strategy
    that exchanges gradients in every step. Under another one K is the next step in which all ranks wait for each other,
    which they do after deciding: nobody has ended that step before.
    """

    def __init__(self, link: Link, *, world_size: int) -> None:
        self._pulse = link.pulse
        self._open_board = link.open_board
        self._world_size = world_size
        self._board: Board | None = None
        self._stop_step: int | None = None

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a request. One read of memory."""
        return self._pulse.asked_to_stop != 0

    @property
    def came_by(self) -> str:
        """What it came by: `SIGTERM`, or `Ctrl-C`."""
        return came_by(self._pulse.asked_to_stop)

    def due(self, step: int, *, meets_in: int = STEPS_TO_COME) -> bool:
        """Whether all ranks stop now, `step` optimizer steps being done; a rank that is alone does so at once.

        meets_in: after so many steps more no rank can be that this one hasn't come to.
        To be called between any two steps while it is pending and training goes on, after waiting for this rank's
        devices. Raises torch's DistError, a RuntimeError, where the store is gone.
        """
        if self._world_size == 1:
            return True
        board = self._counted(step, meets_in)
        if self._stop_step is None:
            self._stop_step = board.stop_step()
        assert self._stop_step is None or step <= self._stop_step, "a step was done without this rank's gradients"
        return step == self._stop_step

    def _counted(self, step: int, meets_in: int) -> Board:
        """The board, on which this rank is counted from the first call on."""
        if self._board is None:
            assert self._open_board is not None, "ranks that are several have a board"
            self._board = self._open_board()
            if self._board.count_for_stop() == self._world_size:
                self._stop_step = step + meets_in
                self._board.decide_stop(self._stop_step)
        return self._board


@contextmanager
def stoppable(link: Link) -> Iterator[None]:
    """Let this rank be asked to stop, by its launcher or by a stop signal, while the block runs.

    A rank that a launcher watches passes a signal on to it. Any other handles it itself, except Ctrl-C, which stays
    Python's KeyboardInterrupt: the process may be at a debugger's prompt. Ignored signals stay ignored, handlers are
    restored, and outside of the main thread none are installed.
    """
    pulse, is_watched = link.pulse, link.is_watched
    numbers = [number for number in STOP_SIGNALS if is_watched or number != signal.SIGINT]

    def request(number: int, _frame: FrameType | None) -> None:
        if is_watched:
            pulse.wish_to_stop(number)
        elif not pulse.asked_to_stop:
            pulse.ask_to_stop(number)
            text = f"{came_by(number)}: saving after this step, then stopping. Ctrl-C ends at once.\n"
            os.write(2, text.encode())  # a handler must not print: it may have interrupted a print

    with _handled(numbers, request):
        pulse.be_stoppable(True)
        try:
            yield
        finally:
            pulse.be_stoppable(False)


@contextmanager
def interrupting() -> Iterator[None]:
    """While this is entered, the stop signals end this process as Ctrl-C does, instead of killing it."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled([number for number in STOP_SIGNALS if number != signal.SIGINT], interrupt):
        yield


def came_by(signal_number: int) -> str:
    """What people call it."""
    return "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Have `handler` called on these signals, but for those that are ignored or that C code has taken."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pid = os.getpid()
    found = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in found.items() if old not in (None, signal.SIG_IGN)}

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            handler(number, frame)
            return
        signal.signal(number, before[signal.Signals(number)])  # in a process that was forked meanwhile: as without us
        os.kill(os.getpid(), number)

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
