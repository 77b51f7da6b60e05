"""Stopping on request: every rank after the same optimizer step, agreed on without a collective and without waiting.

A signal to any process of the run ends up as a number in the status of every rank (`RankStatus.stop_signal`): the
monitor writes it there, or the rank's own handler if no launcher monitors the rank. Needs no torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TypeVar, final

from framework.distributed.store import RunStore
from framework.errors import EXIT_STOPPED
from framework.launch.error_record import of_peers
from framework.launch.plan import MonitorLink
from framework.monitoring.rank_status import RankStatus
from framework.system.signals import SCHEDULER_SIGNALS, STOP_SIGNALS, handling_signals, shown_signal

T = TypeVar("T")

# Steps until all ranks stop, if gradients are exchanged in every step or one step late. See `StopRequest`.
STEPS_TO_STOP = 2

# In the final test, for the batch that a rank is at when it is asked to stop.
_LEAVE_TEST_S = 10.0
_LOOK_EVERY_S = 0.5


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
    def is_alone(self) -> bool:
        """True if there is no other rank."""
        return self._world_size == 1

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


class TestStoppedError(Exception):
    """The final test was stopped on request. Everything else is saved, and resuming runs the test."""


@contextmanager
def stoppable(link: MonitorLink) -> Iterator[None]:
    """Let this rank be asked to stop, by its launcher or by a signal, while the block runs.

    A rank that a launcher monitors passes signals on to it. Any other handles them itself, except Ctrl-C, which stays
    a KeyboardInterrupt: the process may be at a debugger's prompt. Ignored signals stay ignored, handlers are restored,
    and none are installed outside of the main thread.
    """
    rank_status = link.rank_status
    if link.is_watched:
        handlers = passing_on_signals(rank_status)
    else:
        handlers = handling_signals(SCHEDULER_SIGNALS, partial(_note_request, rank_status))
    with handlers:
        rank_status.set_stoppable(True)
        try:
            yield
        finally:
            rank_status.set_stoppable(False)


def passing_on_signals(rank_status: RankStatus) -> AbstractContextManager[None]:
    """Return a context in which this rank passes stop signals on to its monitor, which decides for all ranks."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        rank_status.request_stop(number)

    return handling_signals(STOP_SIGNALS, pass_on)


def _note_request(rank_status: RankStatus, number: int, _frame: FrameType | None) -> None:
    if not rank_status.stop_signal:
        rank_status.set_stop_signal(number)
        # A handler must not print: it may have interrupted a print. The terminal may be gone.
        with suppress(OSError):
            os.write(2, f"{stopping_line(number)} Ctrl-C ends at once.\n".encode())


def stopping_line(signal_number: int) -> str:
    """Return what is printed of a request to stop."""
    return f"{shown_signal(signal_number)}: stopping as soon as all is saved."


@contextmanager
def stoppable_test(request: StopRequest, *, link: MonitorLink) -> Iterator[Callable[[Iterable[T]], Iterator[T]]]:
    """Yield a function that returns the batches of a test, and raises TestStoppedError once a stop is requested.

    Ranks have different numbers of batches, and may exchange data in a forward, so they leave without an agreement. One
    that waits for another which has left is ended `_LEAVE_TEST_S` later, since its devices may wait for ever.
    """
    ended = threading.Event()

    def until_stopped(batches: Iterable[T]) -> Iterator[T]:
        for batch in batches:
            if request.pending:
                raise TestStoppedError
            yield batch

    def end_if_waiting() -> None:
        while not request.pending:
            if ended.wait(_LOOK_EVERY_S):
                return
        if not ended.wait(_LEAVE_TEST_S):
            link.rank_status.mark_done()
            os._exit(EXIT_STOPPED)

    if request.is_alone:
        yield until_stopped
        return
    thread = threading.Thread(target=end_if_waiting, name="stoppable test", daemon=True)
    thread.start()
    try:
        yield until_stopped
    except Exception as error:
        if request.pending and of_peers(error):
            # The other rank has left the test.
            raise TestStoppedError from error
        raise
    finally:
        ended.set()
        thread.join()
