"""What the processes of a run tell each other through its store. Values are JSON. The keys of one attempt:

handshake/...         see `handshake`
rank_status/RANK      [pid, file descriptor] of a rank status that the rank made itself
monitoring/RANK       this rank has opened the rank statuses of all ranks of its node
progress/NODE         {counter, collectives, still_s}, once a second
stop/signal           all ranks are to stop together
stop/count, stop/step how many ranks know; after which optimizer step they stop; see `stopping`
alarm                 {node, cause}: the attempt has failed, so every node's monitor makes its statement
statement/NODE        what the node's monitor knows of its ranks
report                the failure report made of the statements
taken/NODE            this node has the report, so that the host of the store may leave
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
PROBE_S = 1.0
STORE_TIMEOUT_S = 10.0

_LOOPBACKS = (LOOPBACK, "localhost", "::1")
_BACKLOG = 4096
_POLL_S = 0.05
_LONG_POLL_S = 0.5


@final
class RunStore:
    """The keys of one attempt; those of other attempts aren't seen.

    Every call is a round trip and raises torch's DistError, a RuntimeError, if the store is gone.
    """

    def __init__(self, store: Store, *, attempt: int = 0) -> None:
        self._store = store
        self._prefix = f"framework/{attempt}"

    def get(self, key: str) -> Any:
        """Return the value, or None."""
        key = f"{self._prefix}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait_for(self, key: str, *, timeout_s: float) -> Any:
        """Return the value once there is one. Raises TimeoutError."""
        # `wait` of torch's stores prints a warning at each time-out, and doesn't react to Ctrl-C.
        deadline, pause_s = time.monotonic() + timeout_s, _POLL_S
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONG_POLL_S)  # thousands of ranks ask one store
        return value

    def set(self, key: str, value: Any) -> None:
        """Set the value; other processes see it on return, even if this one ends then."""
        key = f"{self._prefix}/{key}"
        self._store.set(key, json.dumps(value))
        self._store.check([key])  # `set` alone doesn't wait for the store to have read it

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return self._store.add(f"{self._prefix}/{key}", amount)

    def request_stop(self, signal_number: int) -> None:
        """Ask all ranks to stop together; the first request counts."""
        if self.get("stop/signal") is None:
            self.set("stop/signal", signal_number)


def connect(host: str, port: int, *, timeout_s: float) -> Store:
    """Return a new connection to the run's store; a call that waits blocks no other connection.

    Raises DistError if there is no answer in time.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_run_store(attempt: int) -> RunStore:
    """Connect to the store at MASTER_ADDR:MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return RunStore(connect(address, port, timeout_s=STORE_TIMEOUT_S), attempt=attempt)


def listen(host: str | None, port: int) -> socket.socket:
    """Return a listening socket: on loopback for None or one of its addresses, otherwise on all addresses.

    Port 0 takes a free one. Raises OSError if the port is taken.
    """
    if host is None or host in _LOOPBACKS:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def await_listener(host: str, port: int, *, timeout_s: float) -> str | None:
    """Wait until a process listens there. Return None, or why none could be reached in time.

    Torch's own client prints a warning for each try that fails.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=PROBE_S).close()
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return error.strerror or str(error)
        time.sleep(_POLL_S)


def host_store(listener: socket.socket, host: str = LOOPBACK) -> Store:
    """Host a store on a listening socket that `host` reaches, for as long as what is returned exists."""
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it from here on
    )
