"""What the monitors of a run exchange through its store. After one failed call the store counts as gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, final

from framework.distributed.store import RunStore, StoreGoneError, call_with_deadline
from framework.monitoring.late_ranks import Progress, max_progress
from framework.monitoring.node_monitor import NodeMonitor

T = TypeVar("T")

_EXCHANGE_EVERY_S = 1.0
_STATEMENTS_TIMEOUT_S = 4.0
_REPORT_TIMEOUT_S = 8.0
_TAKEN_TIMEOUT_S = 3.0
_POLL_S = 0.1


class _Heard(NamedTuple):
    """The last sign of another node."""

    counter: int
    changed_s: float


@final
class NodeExchange:
    """One node's side of the exchange, for one attempt. Call `step` a few times a second."""

    def __init__(self, run_store: RunStore, monitor: NodeMonitor, *, nnodes: int) -> None:
        self._store = run_store
        self._monitor = monitor
        self._nnodes = nnodes
        self._next_s = 0.0
        self._counter = 0
        # By node: the counter it has published, and when that last changed.
        self._heard = dict.fromkeys(range(nnodes), _Heard(0, time.monotonic()))
        self._progress: dict[int, Progress] = {}
        # The progress of the other nodes' ranks.
        self.progress_elsewhere: Progress | None = None
        # The other nodes that made a statement after the last failure.
        self._stated: list[int] = []
        # Set if a node says that the attempt has failed.
        self.alarm: dict[str, Any] | None = None
        # If the store is gone.
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
        heard_node = node if self._monitor.node == 0 else 0
        return time.monotonic() - self._heard[heard_node].changed_s

    def gather(self, own: dict[str, Any], *, cause: str) -> tuple[list[dict[str, Any]], list[int]]:
        """Raise the alarm, and return the statements that come in time, this node's first, and the silent nodes."""
        self._make_statement(own, cause=cause)
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
        self._make_statement(own, cause=cause)
        report = self._collect(["report"], timeout_s=_REPORT_TIMEOUT_S).get("report")
        if report is not None:
            self._try(lambda: self._store.set(f"taken/{self._monitor.node}", True))
        return report

    def _exchange(self) -> None:
        node = self._monitor.node
        furthest = max_progress(self._monitor.states())
        if node == 0:
            # Node 0 hears all nodes, and tells each of them how far the furthest one is.
            for other in range(1, self._nnodes):
                self._hear(other)
            furthest = _furthest([furthest, *self._progress.values()])
        else:
            self._hear(0)
        self.progress_elsewhere = _furthest(self._progress.values())

        self._counter += 1
        progress = {"counter": self._counter, "collectives": furthest.collectives, "still_s": furthest.still_s}
        self._store.set(f"progress/{node}", progress)

        received_signal = self._monitor.received_signal()
        if received_signal:
            self._store.request_stop(received_signal)
        stop_signal = self._store.get("stop/signal")
        if stop_signal and not self._monitor.stop_signal:
            self._monitor.set_stop_signal(stop_signal)
        self.alarm = self._store.get("alarm")

    def _hear(self, node: int) -> None:
        """Read what a node has published, and note when that is new."""
        progress = self._store.get(f"progress/{node}")
        if progress is not None and progress["counter"] != self._heard[node].counter:
            self._heard[node] = _Heard(progress["counter"], time.monotonic())
            self._progress[node] = Progress(progress["collectives"], progress["still_s"])

    def _make_statement(self, own: dict[str, Any], *, cause: str) -> None:
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
        values: dict[str, Any] = {}
        while True:
            for key in keys:
                if key not in values:
                    value = self._try(partial(self._store.get, key))
                    if value is not None:
                        values[key] = value
            if len(values) == len(keys) or self.is_cut or time.monotonic() > deadline:
                return values
            time.sleep(_POLL_S)


def _furthest(progresses: Iterable[Progress]) -> Progress:
    """Return the one with the most collectives; of those the one in which something has changed last."""
    return max(progresses, key=lambda progress: (progress.collectives, -progress.still_s), default=Progress(0, 0.0))
