"""What the watchers of several nodes tell each other through the run's store, with a deadline for everything.

A store whose host is cut off answers nothing, and no call of torch's returns then: so a thread makes the calls, and who
waits for it too long takes the store for gone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from framework.launch.board import Board
from framework.launch.standing import Front
from framework.launch.watch import NodeWatch

T = TypeVar("T")
_CALL_TIMEOUT_S = 5.0
_EXCHANGE_EVERY_S = 1.0
_STATEMENTS_TIMEOUT_S = 4.0
_REPORT_TIMEOUT_S = 8.0
_TAKEN_TIMEOUT_S = 3.0
_POLL_S = 0.1


class StoreGoneError(Exception):
    """The run's store doesn't answer: its node is down, or the link to it is cut."""


@final
class Deadlined:
    """Makes calls in a thread of its own. After one that took too long every later one raises at once."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._gone = False
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def __call__(self, call: Callable[[], T], *, timeout_s: float = _CALL_TIMEOUT_S) -> T:
        """What `call` gives. Raises StoreGoneError where it raises RuntimeError, as stores do, or takes too long."""
        if self._gone:
            raise StoreGoneError
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            result, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            self._gone = True
            raise StoreGoneError from None
        if isinstance(error, RuntimeError):
            self._gone = True
            raise StoreGoneError from error
        if error is not None:
            raise error
        given: T = result
        return given

    def close(self) -> None:
        """Let the thread go, if it isn't held up in a call; it is a daemon."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.put((call(), None))
            except Exception as error:
                answer.put((None, error))


@final
class Exchange:
    """One node's side of it, for one attempt. `step` is to be called a few times a second."""

    def __init__(self, board: Board, watch: NodeWatch, *, nnodes: int) -> None:
        self._board = board
        self._watch = watch
        self._nnodes = nnodes
        self._call = Deadlined()
        self._next_s = 0.0
        begin = (0, time.monotonic())
        self._heard = dict.fromkeys(range(nnodes), begin)  # node → its counter, and when that was new
        self._counter = 0
        self._fronts: dict[int, Front] = {}
        self.front: Front | None = None  # of the other nodes' ranks
        self.alarm: dict[str, Any] | None = None  # another node says that the attempt has failed
        self.is_cut = False

    def step(self) -> None:
        """Tell the others how far this node's ranks are, hear how far theirs are, pass on wishes to stop."""
        if self.is_cut or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EXCHANGE_EVERY_S
        try:
            self._call(self._talk)
        except StoreGoneError:
            self.is_cut = True

    def _talk(self) -> None:
        self._counter += 1
        own = self._watch.front()
        if self._watch.node == 0:
            for node in range(1, self._nnodes):
                self._hear(node, self._board.pulse_of(node))
            self._board.pulse(0, self._told(_foremost([own, *self._fronts.values()])))
            self.front = _foremost(list(self._fronts.values()))
        else:
            self._board.pulse(self._watch.node, self._told(own))
            self._hear(0, self._board.pulse_of(0))
            self.front = self._fronts.get(0)
        wish = self._watch.wish()
        if wish:
            self._board.wish_to_stop(wish)
        asked = self._board.stop_wish()
        if asked and not self._watch.asked_to_stop:
            self._watch.ask_to_stop(asked)
        self.alarm = self._board.alarm()

    def _told(self, front: Front) -> dict[str, Any]:
        return {"counter": self._counter, "collectives": front.collectives, "still_s": front.still_s}

    def _hear(self, node: int, said: dict[str, Any] | None) -> None:
        if said is not None and said["counter"] != self._heard[node][0]:
            self._heard[node] = (said["counter"], time.monotonic())
            self._fronts[node] = Front(said["collectives"], said["still_s"])

    def wish_to_stop(self, signal_number: int) -> None:
        """Ask the ranks of all nodes to stop together. Raises StoreGoneError."""
        self._call(lambda: self._board.wish_to_stop(signal_number))

    def raise_alarm(self, cause: str) -> None:
        """Say that the attempt has failed, as far as the others can be reached."""
        try:
            self._call(lambda: self._board.raise_alarm(self._watch.node, cause))
        except StoreGoneError:
            self.is_cut = True

    def silent_for(self, node: int) -> float:
        """Seconds since that node's watcher was heard; node 0 hears all, the others only node 0."""
        return time.monotonic() - self._heard[node if self._watch.node == 0 else 0][1]

    def gather(self, own: dict[str, Any], *, cause: str) -> tuple[list[dict[str, Any]], list[int]]:
        """Every node's statement that comes in time, the own one first; and the nodes that said nothing.

        Raises nothing: where the store is gone, all the others are silent.
        """
        statements = {self._watch.node: own}
        try:
            self._call(lambda: self._board.raise_alarm(self._watch.node, cause))
            self._call(lambda: self._board.state(self._watch.node, own))
            deadline = time.monotonic() + _STATEMENTS_TIMEOUT_S
            while len(statements) < self._nnodes and time.monotonic() < deadline:
                for node in set(range(self._nnodes)) - statements.keys():
                    said = self._call(lambda node=node: self._board.statement(node))  # type: ignore[misc]
                    if said is not None:
                        statements[node] = said
                time.sleep(_POLL_S)
        except StoreGoneError:
            self.is_cut = True
        return list(statements.values()), sorted(set(range(self._nnodes)) - statements.keys())

    def publish(self, report: dict[str, Any]) -> None:
        """Give the report to the other nodes, as far as they can be reached; the store may go once they have it."""
        deadline = time.monotonic() + _TAKEN_TIMEOUT_S
        try:
            self._call(lambda: self._board.publish(report))
            waiting = {node for node in range(self._nnodes) if node != self._watch.node and self._has_stated(node)}
            while waiting and time.monotonic() < deadline:
                waiting = {node for node in waiting if not self._has_taken(node)}
                time.sleep(_POLL_S)
        except StoreGoneError:
            self.is_cut = True

    def await_report(self, own: dict[str, Any], *, cause: str) -> dict[str, Any] | None:
        """State, and wait for node 0's report; None where it doesn't come in time."""
        try:
            self._call(lambda: self._board.raise_alarm(self._watch.node, cause))
            self._call(lambda: self._board.state(self._watch.node, own))
            deadline = time.monotonic() + _REPORT_TIMEOUT_S
            while time.monotonic() < deadline:
                report: dict[str, Any] | None = self._call(self._board.report)
                if report is not None:
                    self._call(lambda: self._board.take_report(self._watch.node))
                    return report
                time.sleep(_POLL_S)
        except StoreGoneError:
            self.is_cut = True
        return None

    def _has_stated(self, node: int) -> bool:
        return self._call(lambda: self._board.statement(node)) is not None

    def _has_taken(self, node: int) -> bool:
        return self._call(lambda: self._board.has_taken_report(node))

    def close(self) -> None:
        self._call.close()


def _foremost(fronts: list[Front]) -> Front:
    top = max((each.collectives for each in fronts), default=0)
    return Front(top, min((each.still_s for each in fronts if each.collectives == top), default=0.0))
