"""Rank 0 of ranks that something else has started: what it compares with the others, and tells them.

The store they meet at is the one that torchrun's agent hosts, or else rank 0's, which then is the last to leave.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

from framework.config.saved import resume_argument
from framework.errors import EXIT_STOPPED, RunError
from framework.launch.board import connect
from framework.launch.endpoint import PROBE_S, await_listener, listen
from framework.launch.environment import Place
from framework.launch.nodes import Deadlined, StoreGoneError
from framework.launch.offer import Agreement, Offer, fingerprint
from framework.run_dir import RunDir

if TYPE_CHECKING:
    from torch.distributed import Store

WAIT_S = 600.0
"""How long ranks wait for one another, where no backend.init_timeout is known."""

_FAREWELL_S = 60.0  # of the rank that hosts the store, for the others
_SHORT_FAREWELL_S = 5.0


@final
class Leader:
    """Rank 0's dealings with the other ranks. Needs torch from the first call of `compare` on.

    arguments: what rank 0 composes.
    """

    def __init__(self, place: Place, arguments: Sequence[str]) -> None:
        self.place = place
        self.arguments = list(arguments)
        self._fingerprint = fingerprint(arguments, working_dir=Path.cwd())
        self._agreement: Agreement | None = None
        self._compared = False
        self._answered = False

    def go_on(self) -> None:
        """After torchrun has started the ranks anew: have the run of the attempt before go on, if it has a checkpoint.

        Its store has the run directory, if it is the agent's. Raises RunError where that can't be reached.
        """
        if not self.place.agent_store:
            return
        before = self._meet(WAIT_S).remembered()
        if before is not None and any(RunDir(Path(before)).checkpoints.glob("step_*")):
            own = [text for text in self.arguments if text.partition("=")[0] not in ("resume", "init_from")]
            self.arguments = [*own, *shlex.split(resume_argument(before))]

    def compare(self, *, timeout_s: float) -> None:
        """Wait for all ranks and compare what they were started with.

        Raises ConfigError naming what differs, RunError for ranks that don't come or a store that can't be had.
        """
        agreement = self._meet(timeout_s)
        self._compared = True
        agreement.compare(self._fingerprint, timeout_s=timeout_s)

    def make(self, offer: Offer) -> None:
        """Have the other ranks run their part."""
        agreement = self._meet(WAIT_S)
        agreement.remember(offer.run_dir)
        agreement.make(offer)
        self._answered = True

    def close(self, status: int) -> None:
        """Tell the others, where they were never told, that rank 0 leaves with `status`; host them until they left."""
        if self._answered and self.place.agent_store:
            return
        with suppress(RunError, RuntimeError):  # nobody can be told: that has been said, or is why rank 0 ends
            agreement = self._meet(_FAREWELL_S)
            if not self._answered:
                agreement.end(status)
            if not self.place.agent_store:
                # After a failure some may be gone without a word.
                limit_s = _SHORT_FAREWELL_S if self._answered and status not in (0, EXIT_STOPPED) else _FAREWELL_S
                agreement.wait_for_all_to_leave(timeout_s=limit_s, latecomers=not self._compared)

    def _meet(self, timeout_s: float) -> Agreement:
        if self._agreement is None:
            store = reach(self.place, timeout_s=timeout_s) if self.place.agent_store else _host(self.place)
            self._agreement = Agreement(store, count=self.place.world_size, attempt=self.place.attempt)
        return self._agreement


# The store


def reach(place: Place, *, timeout_s: float) -> Store:
    """A connection to the store, once somebody listens there. Raises RunError."""
    deadline = time.monotonic() + timeout_s
    reason = await_listener(place.host, place.port, timeout_s=timeout_s)
    if reason is not None:
        raise RunError(
            f"Rank {place.rank} found nobody at {place.host}:{place.port} within {timeout_s:g} s ({reason}).\n"
            f"Rank 0 must run there, and {place.port_from} name a port that this machine can reach."
        )
    left_s = max(PROBE_S, deadline - time.monotonic())
    try:  # torch's client waits without end where somebody listens and says nothing
        return Deadlined()(partial(connect, place.host, place.port, timeout_s=left_s), timeout_s=left_s)
    except StoreGoneError as error:
        raise RunError(
            f"Rank {place.rank} got no answer from a store at {place.host}:{place.port} within {timeout_s:g} s: "
            f"something else may have that port.\nLook at what rank 0 printed. {_other_port(place)}"
        ) from error


def _host(place: Place) -> Store:
    """The store that all ranks will use, in this process. Raises RunError where its port is taken."""
    try:
        listener = listen(place.host, place.port)
    except OSError as error:
        raise RunError(
            f"Rank 0 can't host the ranks' store at {place.host}:{place.port} ({place.port_from}): "
            f"{error.strerror or error}.\n{_other_port(place)}"
        ) from error
    from torch.distributed import TCPStore

    return TCPStore(
        place.host,
        place.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it from here on
    )


def _other_port(place: Place) -> str:
    if place.starter == "torchrun":
        return "Start torchrun with another --master-port, or with --rdzv-backend=c10d."
    return "Set MASTER_PORT to a free port of that machine, the same for every rank."
