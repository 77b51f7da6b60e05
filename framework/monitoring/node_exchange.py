"""What the monitors of a run exchange through its store. After one failed call the store counts as gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, final

from framework.distributed.store import RunStore, StoreGoneError, call_with_deadline
from framework.monitoring.late_ranks import Progress, max_progress
from framework.monitoring.node_monitor import NodeMonitor

T = TypeVar("T")
_EXCHANGE_EVERY_S = 1.0
_STATEMENTS_TIMEOUT_S = 4.0
_REPORT_TIMEOUT_S = 8.0
_TAKEN_TIMEOUT_S = 3.0
_POLL_S = 0.1


@final
class NodeExchange:
    """One node's side of the exchange, for one attempt. Call `step` a few times a second."""

    def __init__(self, run_store: RunStore, monitor: NodeMonitor, *, nnodes: int) -> None:
        self._store = run_store
        self._monitor = monitor
        self._nnodes = nnodes
        self._next_s = 0.0
        self._counter = 0
        self._heard = dict.fromkeys(range(nnodes), (0, time.monotonic()))  # node → its counter, and when it changed
        self._progress: dict[int, Progress] = {}
        self.progress_elsewhere: Progress | None = None  # of the other nodes' ranks
        self._stated: list[int] = []  # the other nodes that made a statement after the last failure
        self.alarm: dict[str, Any] | None = None  # some node says that the attempt has failed
        self.is_cut = False

    def step(self) -> None:
        """Exchange progress with the other nodes, pass on stop requests, look for an alarm."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EXCHANGE_EVERY_S
            self._try(self._exchange)

    def request_stop(self, signal_number: int) -> bool:
        """Ask the ranks of all nodes to stop together; return False if the store is gone."""
        self._try(lambda: self._store.request_stop(signal_number))
        return not self.is_cut

    def raise_alarm(self, cause: str) -> None:
        """Tell the nodes that can be reached that the attempt has failed."""
        self._try(lambda: self._store.set("alarm", {"node": self._monitor.node, "cause": cause}))

    def silent_for(self, node: int) -> float:
        """Return the seconds since that node's monitor last answered. Node 0 sees all nodes, the others only node 0."""
        return time.monotonic() - self._heard[node if self._monitor.node == 0 else 0][1]

    def gather(self, own: dict[str, Any], *, cause: str) -> tuple[list[dict[str, Any]], list[int]]:
        """Raise the alarm, and return the statements that come in time, this node's first, and the silent nodes."""
        self._state(own, cause=cause)
        others = [node for node in range(self._nnodes) if node != self._monitor.node]
        statements = self._collect([f"statement/{node}" for node in others], timeout_s=_STATEMENTS_TIMEOUT_S)
        self._stated = [node for node in others if f"statement/{node}" in statements]
        return [own, *statements.values()], sorted(set(others) - set(self._stated))

    def publish(self, report: dict[str, Any]) -> None:
        """Give the report to the nodes that made a statement, and wait until they have it: the store may go then."""
        self._try(lambda: self._store.set("report", report))
        self._collect([f"taken/{node}" for node in self._stated], timeout_s=_TAKEN_TIMEOUT_S)

    def find_report(self) -> dict[str, Any] | None:
        """Return the report if it is published; None if it isn't, or the store is gone."""
        return self._try(lambda: self._store.get("report"))

    def await_report(self, own: dict[str, Any], *, cause: str) -> dict[str, Any] | None:
        """Raise the alarm, make this node's statement, and return node 0's report; None if it doesn't come in time."""
        self._state(own, cause=cause)
        report = self._collect(["report"], timeout_s=_REPORT_TIMEOUT_S).get("report")
        if report is not None:
            self._try(lambda: self._store.set(f"taken/{self._monitor.node}", True))
        return report

    def _exchange(self) -> None:
        node = self._monitor.node
        own = max_progress(self._monitor.states())
        for other in range(1, self._nnodes) if node == 0 else [0]:
            self._hear(other)
        self._counter += 1
        furthest = _max_progress([own, *self._progress.values()]) if node == 0 else own
        self._store.set(
            f"progress/{node}",
            {"counter": self._counter, "collectives": furthest.collectives, "still_s": furthest.still_s},
        )
        self.progress_elsewhere = _max_progress(self._progress.values())
        requested = self._monitor.received_signal()
        if requested:
            self._store.request_stop(requested)
        stop_signal = self._store.get("stop/signal")
        if stop_signal and not self._monitor.stop_signal:
            self._monitor.set_stop_signal(stop_signal)
        self.alarm = self._store.get("alarm")

    def _hear(self, node: int) -> None:
        said = self._store.get(f"progress/{node}")
        if said is not None and said["counter"] != self._heard[node][0]:
            self._heard[node] = (said["counter"], time.monotonic())
            self._progress[node] = Progress(said["collectives"], said["still_s"])

    def _state(self, own: dict[str, Any], *, cause: str) -> None:
        self.raise_alarm(cause)
        self._try(lambda: self._store.set(f"statement/{self._monitor.node}", own))

    def _try(self, call: Callable[[], T]) -> T | None:
        """Return the result, or None if the store is gone."""
        if self.is_cut:
            return None
        try:
            return call_with_deadline(call)
        except StoreGoneError:
            self.is_cut = True
            return None

    def _collect(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
        """Wait for the values of these keys; return those that come in time."""
        deadline = time.monotonic() + timeout_s
        found: dict[str, Any] = {}
        while True:
            for key in set(keys) - found.keys():
                value = self._try(partial(self._store.get, key))
                if value is not None:
                    found[key] = value
            if len(found) == len(keys) or self.is_cut or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)


def _max_progress(progress: Iterable[Progress]) -> Progress:
    return max(progress, key=lambda each: (each.collectives, -each.still_s), default=Progress(0, 0.0))
