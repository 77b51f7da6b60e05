"""What the processes of a run tell each other through its store: one place for every key and its form.

A board is of one attempt (a run that was restarted has several); nothing of an earlier attempt is seen on it. Values
are JSON. Every call is a round trip to the store and raises torch's DistError, a RuntimeError, where it is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Presence:
    """Where a rank runs that nothing of ours has started, and which of its file descriptors is its pulse."""

    rank: int
    host: str
    pid: int
    pulse_fd: int


@final
class Board:
    """The keys of one attempt in a store that every process of the run can reach."""

    def __init__(self, store: Store, *, attempt: int = 0) -> None:
        self._store = store
        self._prefix = f"framework/{attempt}"

    # Ranks that nothing of ours has started tell their node's watcher where to look.

    def arrive(self, presence: Presence) -> None:
        self._say(f"here/{presence.rank}", asdict(presence))

    def presence(self, rank: int) -> Presence | None:
        said = self._heard(f"here/{rank}")
        return None if said is None else Presence(**said)

    def watch_from(self, rank: int) -> None:
        """Say that this rank has opened the pulses of all ranks of its node."""
        self._say(f"watching/{rank}", True)

    def is_watching(self, rank: int) -> bool:
        return self._heard(f"watching/{rank}") is not None

    # Stopping on request.

    def wish_to_stop(self, signal_number: int) -> None:
        """Ask all ranks to stop together; the first wish counts."""
        if self.stop_wish() is None:
            self._say("stop/wish", signal_number)

    def stop_wish(self) -> int | None:
        """The signal for which all are asked to stop, None where they aren't."""
        wish: int | None = self._heard("stop/wish")
        return wish

    def count_for_stop(self) -> int:
        """Say that this rank knows of the wish; gives how many do, it included."""
        return self._store.add(f"{self._prefix}/stop/count", 1)

    def decide_stop(self, step: int) -> None:
        """Say after which optimizer step all stop; there for certain on return."""
        self._say("stop/step", step)

    def stop_step(self) -> int | None:
        step: int | None = self._heard("stop/step")
        return step

    # Failures: each node's watcher makes a statement, one merges them to the report.

    def raise_alarm(self, node: int, cause: str) -> None:
        """Say that the attempt has failed, so that every node's watcher makes its statement."""
        self._say("alarm", {"node": node, "cause": cause})

    def alarm(self) -> dict[str, Any] | None:
        alarm: dict[str, Any] | None = self._heard("alarm")
        return alarm

    def state(self, node: int, statement: dict[str, Any]) -> None:
        self._say(f"statement/{node}", statement)

    def statement(self, node: int) -> dict[str, Any] | None:
        statement: dict[str, Any] | None = self._heard(f"statement/{node}")
        return statement

    def publish(self, report: dict[str, Any]) -> None:
        self._say("report", report)

    def report(self) -> dict[str, Any] | None:
        report: dict[str, Any] | None = self._heard("report")
        return report

    def take_report(self, node: int) -> None:
        """Say that this node has the report, so that whoever hosts the store may leave."""
        self._say(f"taken/{node}", True)

    def has_taken_report(self, node: int) -> bool:
        return self._heard(f"taken/{node}") is not None

    # How far a node's ranks are, for the other nodes' watchers; said again and again.

    def pulse(self, node: int, summary: dict[str, Any]) -> None:
        self._say(f"pulse/{node}", summary)

    def pulse_of(self, node: int) -> dict[str, Any] | None:
        summary: dict[str, Any] | None = self._heard(f"pulse/{node}")
        return summary

    def _say(self, key: str, value: Any) -> None:
        key = f"{self._prefix}/{key}"
        self._store.set(key, json.dumps(value))
        self._store.check([key])  # `set` awaits no answer, and this process may be gone before the store has read it

    def _heard(self, key: str) -> Any:
        key = f"{self._prefix}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def connect(host: str, port: int, *, timeout_s: float) -> Store:
    """A connection of its own to the run's store; one that is waited on holds up nobody else's.

    Raises DistError where nobody answers in time.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
