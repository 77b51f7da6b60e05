"""How ranks, or nodes, that were started one by one meet and agree on what to run.

`launch.elastic` meets with nodes, `launch.external` with ranks; both use what is here, in this order:

    member 0: open, compare, send         the others: open, follow
    before each attempt (nodes): meet     at the end: close

A member is a rank or a node, as `kind` says, and has an index from 0 on. Only member 0 composes the configuration. It
writes a fingerprint of what it was started with to the store. The others compare theirs with it, and write the
differences. Member 0 reads them and sends all the same answer: what to run, or an exit status.

    rendezvous/fingerprint     of member 0
    rendezvous/here/I          {host, differences} of member I
    rendezvous/answer          {spec} or {status}
    rendezvous/left/I          member I doesn't need the store any more
    rendezvous/met/I           member I has come to this attempt
    rendezvous/all_met         all have
    rendezvous/done/I          member I has done its work
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from framework.distributed.store import (
    PROBE_S,
    SECRET,
    RunStore,
    StoreGoneError,
    UnverifiedError,
    call_with_deadline,
)
from framework.errors import EXIT_STOPPED, EXIT_WRONG_REQUEST, ConfigError, FrameworkError, RunError
from framework.launch.fingerprint import Fingerprint, differences
from framework.launch.meeting_point import MeetingPoint
from framework.launch.run_spec import RunSpec
from framework.monitoring.report import list_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

# How long ranks wait for one another if no backend.init_timeout is known.
WAIT_S = 600.0

_POLL_S = 0.05
# How long the host of the store waits for the others to leave.
_CLOSE_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_AFTER_FAILURE_S = 5.0
_SHOWN = 6


@dataclass(frozen=True)
class _Member:
    """One that differs from member 0."""

    index: int
    host: str


@final
class Rendezvous:
    """One member's side of the rendezvous. Closing it tells the others.

    Calls that use the store may raise torch's DistError, a RuntimeError, if it is gone.
    """

    def __init__(self, own: Fingerprint, point: MeetingPoint, *, index: int, count: int, attempt: int = 0) -> None:
        """Members have the indices 0 to `count` - 1."""
        self._own = own
        self._point = point
        self._index = index
        self._count = count
        self._attempt = attempt
        self._is_host = index == 0 and not point.hosted_elsewhere

        # Parts of messages.
        self._kind = point.kind
        self._address = point.address
        self._this = point.name_of(index)
        self._zero = point.name_of(0)
        self._other_secret = (
            f"its secret isn't {self._kind} 0's: set {SECRET}, or type topology.rdzv_secret, the same for every "
            f"{self._kind}"
        )

        self._store: Store | None = None
        # How this member differs from member 0.
        self._differences: list[str] = []
        self._is_compared = False
        self._is_answered = False

    def open(self, *, timeout_s: float) -> Store:
        """Return the store: host it, or connect once its host listens. Raises RunError, TopologyError."""
        if self._store is None:
            if self._is_host:
                self._store = self._point.host()
            else:
                self._store = self._point.reach(self._index, timeout_s=timeout_s)
            self._keys = RunStore(self._store, attempt=self._attempt)
            if self._index == 0:
                # Also for members that come again later, after a restart.
                self._keys.set("rendezvous/fingerprint", self._own)
        return self._store

    def close(self, status: int) -> None:
        """Leave, with an exit status.

        Member 0 sends it to the others if they have no answer yet. If it hosts the store, which ends with it, it waits
        for them to leave.
        """
        # An error of the store was printed, or is why this process ends.
        with suppress(FrameworkError, RuntimeError, StoreGoneError):
            if self._index > 0:
                if self._store is not None:
                    call_with_deadline(lambda: self._keys.set(f"rendezvous/left/{self._index}", True))
                return
            if not self._is_answered:
                self.open(timeout_s=_CLOSE_TIMEOUT_S)
                self._keys.set("rendezvous/answer", {"status": status})
            if self._is_host:
                self._wait_for_others_to_leave(status)

    def _wait_for_others_to_leave(self, status: int) -> None:
        others: Iterable[int] = range(1, self._count)
        limit_s = _CLOSE_TIMEOUT_S
        # Before the comparison, those that haven't come yet are waited for, too: they need the answer.
        if self._is_compared:
            others = [index for index in others if self._statement(index)]
            # After a failure some never leave.
            if status not in (0, EXIT_STOPPED):
                limit_s = _CLOSE_TIMEOUT_AFTER_FAILURE_S
        _await(self._has_left, others, timeout_s=limit_s)

    # Member 0

    def compare(self, *, timeout_s: float) -> None:
        """Wait until all the others have compared themselves with this process.

        Raises ConfigError naming who differs in what, RunError naming who hasn't come within `timeout_s`, and what
        `open` raises.
        """
        self.open(timeout_s=timeout_s)
        self._is_compared = True
        others = range(1, self._count)
        self._await_all(self._statement, others, timeout_s=timeout_s)

        # Many ranks usually differ in the same way.
        differing: dict[tuple[str, ...], list[_Member]] = {}
        for index in others:
            statement = self._statement(index)
            if statement["differences"]:
                members = differing.setdefault(tuple(statement["differences"]), [])
                members.append(_Member(index, statement["host"]))
        if differing:
            raise self._refusal(differing)

    def send(self, spec: RunSpec) -> None:
        """Answer the others with what to run."""
        self.open(timeout_s=WAIT_S)
        self._keys.set("rendezvous/answer", {"spec": asdict(spec)})
        self._is_answered = True

    def sent_before(self, attempt: int) -> RunSpec | None:
        """Return what ran in an earlier attempt, if the store has outlived it. Raises RunError."""
        store = self.open(timeout_s=WAIT_S)
        answer = RunStore(store, attempt=attempt).get("rendezvous/answer")
        if answer is None or "spec" not in answer:
            return None
        return RunSpec.from_plain(answer["spec"])

    # The others

    def follow(self, *, timeout_s: float) -> RunSpec | int:
        """Compare this process with member 0, and return its answer: what to run, or the exit status to leave with.

        Member 0 prints the differences of all. Raises RunError if it can't be reached, ends, or doesn't answer in time.
        """
        deadline = time.monotonic() + timeout_s
        self.open(timeout_s=timeout_s)
        try:
            # With a deadline of its own: if the link to the store is cut, torch's calls don't return.
            return call_with_deadline(lambda: self._compare_and_receive(deadline), timeout_s=timeout_s + PROBE_S)
        except (TimeoutError, StoreGoneError) as error:
            what = "has lost"
            if isinstance(error, TimeoutError):
                what = f"has waited {timeout_s:g} s for"
            raise RunError(
                f"{self._this} {what} {self._kind} 0 at {self._address}, which hadn't said what to run.\n"
                f"Look at what {self._kind} 0 printed; type backend.init_timeout=TIME if it only needs longer."
            ) from error

    def refusal(self, status: int) -> FrameworkError:
        """Return the error of a member that member 0 has answered with this exit status."""
        if self._differences:
            this = _Member(self._index, socket.gethostname())
            return self._refusal({tuple(self._differences): [this]})
        error = ConfigError if status == EXIT_WRONG_REQUEST else RunError
        return error(f"{self._zero} at {self._address} has ended before the run began. Look at what it printed.")

    # All

    def meet(self, *, max_restarts: int, timeout_s: float) -> int:
        """Wait until all have come to the next attempt, and return its number. Raises RunError.

        A process that was restarted ends the attempt that its predecessor was part of.
        """
        store = self.open(timeout_s=timeout_s)
        attempt = 0
        while RunStore(store, attempt=attempt).get("rendezvous/all_met"):
            attempt += 1

        if attempt > 0:
            before = RunStore(store, attempt=attempt - 1)
            if before.get("alarm") is None:
                before.set("alarm", {"node": self._index, "cause": f"{self._this} was restarted"})
        if attempt > max_restarts:
            raise RunError("A node was restarted, and no restart was left: launcher.max_restarts allows for more.")

        present = RunStore(store, attempt=attempt)
        self._present = present
        present.set(f"rendezvous/met/{self._index}", True)
        self._await_all(lambda index: present.get(f"rendezvous/met/{index}"), range(self._count), timeout_s=timeout_s)
        present.set("rendezvous/all_met", True)
        return attempt

    def all_done(self) -> bool:
        """Tell the others that this member has done its work in the attempt; return True if all have."""
        self._present.set(f"rendezvous/done/{self._index}", True)
        return all(self._present.get(f"rendezvous/done/{index}") for index in range(self._count))

    def _statement(self, index: int) -> Any:
        """Return what another member wrote when it came, or None; of one with another secret only that."""
        try:
            return self._keys.get(f"rendezvous/here/{index}")
        except UnverifiedError:
            return {"host": "an unknown host", "differences": [self._other_secret]}

    def _has_left(self, index: int) -> bool:
        try:
            return bool(self._keys.get(f"rendezvous/left/{index}"))
        except UnverifiedError:
            # It has been refused, and needs nothing more.
            return True

    def _await_all(self, has_come: Callable[[int], Any], indices: Iterable[int], *, timeout_s: float) -> None:
        missing = _await(has_come, indices, timeout_s=timeout_s)
        if missing:
            raise RunError(
                f"{list_ranks(missing, noun=self._kind).capitalize()} of {self._count} didn't come to {self._address} "
                f"within backend.init_timeout={timeout_s:g} s.\n"
                "Check that they were started with this same command and can reach this machine."
            )

    def _compare_and_receive(self, deadline: float) -> RunSpec | int:
        # An earlier process of this member may have left.
        self._keys.set(f"rendezvous/left/{self._index}", False)
        host = socket.gethostname()
        try:
            zeros = self._keys.wait_for("rendezvous/fingerprint", timeout_s=deadline - time.monotonic())
        except UnverifiedError:
            # With another secret than member 0's, the answer couldn't be verified either.
            self._keys.set(f"rendezvous/here/{self._index}", None)
            raise self._refusal({(self._other_secret,): [_Member(self._index, host)]}) from None

        self._differences = differences(self._own, zeros, kind=self._kind)
        self._keys.set(f"rendezvous/here/{self._index}", {"host": host, "differences": self._differences})
        answer = self._keys.wait_for("rendezvous/answer", timeout_s=deadline - time.monotonic())
        if "spec" in answer and not self._differences:
            return RunSpec.from_plain(answer["spec"])
        return int(answer.get("status", EXIT_WRONG_REQUEST))

    def _refusal(self, differing: Mapping[tuple[str, ...], Sequence[_Member]]) -> ConfigError:
        """Return the error that lists the differences from member 0, and the members that have them."""
        lines = [f"The {self._kind}s were started differently, so nothing was run:"]
        for found, members in differing.items():
            hosts = sorted({member.host for member in members})
            indices = list_ranks([member.index for member in members], noun=self._kind)
            lines.append(f"{indices.capitalize()} on {', '.join(hosts)}:")
            lines += [f"  {line}" for line in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  and {len(found) - _SHOWN} more")
        lines.append(f"Start every {self._kind} with the same command, the same files and the same versions.")
        return ConfigError("\n".join(lines))


def _await(is_done: Callable[[int], Any], indices: Iterable[int], *, timeout_s: float) -> list[int]:
    """Wait until `is_done` holds for each index; return those for which it doesn't after that time."""
    deadline = time.monotonic() + timeout_s
    missing = list(indices)
    while True:
        missing = [index for index in missing if not is_done(index)]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(_POLL_S)
