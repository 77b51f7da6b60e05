"""The place where the members of a rendezvous meet: a store that one of them hosts, or torchrun's agent."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from framework.distributed.store import (
    PROBE_S,
    STORE_TIMEOUT_S,
    StoreGoneError,
    await_listener,
    call_with_deadline,
    connect,
    host_store,
    listen,
)
from framework.errors import RunError, TopologyError

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where the members meet, and how messages speak of it."""

    # Host and port.
    endpoint: tuple[str, int]
    # What the members are: "rank" or "node".
    kind: str
    # How messages call the endpoint.
    address: str
    # What the user sets for another port.
    port_option: str
    # True: the store is neither hosted by member 0 nor ends with it.
    hosted_elsewhere: bool = False

    def name_of(self, index: int) -> str:
        """Return a member's name at the beginning of a sentence, such as `Node 0`."""
        return f"{self.kind.capitalize()} {index}"

    def host(self) -> Store:
        """Host the store, as member 0. Raises RunError, TopologyError."""
        host, port = self.endpoint
        try:
            return host_store(listen(host, port), host)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise TopologyError(
                    f"{self.name_of(0)} doesn't reach itself at {self.address}.\n"
                    f"Name {self.kind} 0 by an address that is its own, as the other {self.kind}s know it."
                ) from error
            raise RunError(
                f"{self.name_of(0)} can't host the store of the run at {self.address}: "
                f"{os.strerror(error.errno or 0)}.\n{self._other_port}"
            ) from error

    def reach(self, index: int, *, timeout_s: float) -> Store:
        """Connect to the store, as the member of this index, once its host listens. Raises RunError."""
        # This takes a second or more, in which member 0 composes the configuration.
        importlib.import_module("torch.distributed")
        host, port = self.endpoint
        deadline = time.monotonic() + timeout_s

        # torchrun's agent listens before it starts this process; if it doesn't, it has been killed.
        limit_s = min(timeout_s, STORE_TIMEOUT_S) if self.hosted_elsewhere else timeout_s
        reason = await_listener(host, port, timeout_s=limit_s)
        if reason is not None:
            raise RunError(
                f"{self.name_of(index)} could not reach {self.address} within {limit_s:g} s ({reason}).\n"
                f"Check that {self.kind} 0 was started there and can be reached from this machine."
            )

        left_s = max(PROBE_S, deadline - time.monotonic())
        try:
            # torch's client waits forever if something else listens there and doesn't answer.
            return call_with_deadline(partial(connect, host, port, timeout_s=left_s), timeout_s=left_s)
        except StoreGoneError as error:
            raise RunError(
                f"{self.name_of(index)} got no answer from a store at {self.address} within {timeout_s:g} s: something "
                f"else may have that port.\nLook at what {self.kind} 0 printed. {self._other_port}"
            ) from error

    @property
    def _other_port(self) -> str:
        return f"Set {self.port_option} to a free port of that machine, the same for every {self.kind}."
