"""What the processes of a run tell each other through its store. Values are JSON. The keys of one attempt:

rendezvous/...        see `launch.rendezvous`
rank_status/RANK      [pid, file descriptor] of a rank status that the rank made itself
monitoring/RANK       this rank has opened the rank statuses of all ranks of its node
progress/NODE         {counter, collectives, still_s}, once a second
stop/signal           all ranks are to stop together
stop/count, stop/step how many ranks know; after which optimizer step they stop; see `stopping`
alarm                 {node, cause}: the attempt has failed, so every node's monitor makes its statement
statement/NODE        what the node's monitor knows of its ranks
report                the failure report made of the statements
taken/NODE            this node has the report, so that the host of the store may leave

If the host of the store is cut off, torch's calls never return: see `call_with_deadline`.

Torch's store has no authentication: whoever reaches its port can read and write it. So each value carries an HMAC of
its key and itself, made with the run's secret, and a value that doesn't verify is refused. Counters can't carry one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

from framework.errors import RunError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
# The environment variable with the secret of a run on several nodes.
SECRET = "FRAMEWORK_RDZV_SECRET"
# The description of a process group whose collectives `StatusPage.collectives` counts too.
COUNTED_GROUP = "counted with the default group"

PROBE_S = 1.0
STORE_TIMEOUT_S = 10.0

_CALL_TIMEOUT_S = 5.0
_DIGEST_CHARS = 2 * hashlib.sha256().digest_size
_BACKLOG = 4096
_POLL_S = 0.05
_LONG_POLL_S = 0.5


class StoreGoneError(Exception):
    """The run's store doesn't answer: its node is down, or the link to it is cut."""


class UnverifiedError(RunError):
    """A value in the run's store wasn't written by a process that has this run's secret."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{key} in the run's store was refused: it wasn't written with this run's secret.\n"
            f"Set {SECRET}, or type topology.rdzv_secret, the same on every node, and use no port of another run."
        )


@final
class RunStore:
    """The keys of one attempt; those of other attempts aren't seen.

    Every call is a round trip and raises torch's DistError, a RuntimeError, if the store is gone. What reads a value
    raises UnverifiedError if it wasn't written with the secret of this process.
    """

    def __init__(self, store: Store, *, attempt: int = 0) -> None:
        self._store = store
        self._prefix = f"framework/{attempt}"
        self._secret = os.fsencode(os.environ.get(SECRET, ""))

    def get(self, key: str) -> Any:
        """Return the value, or None."""
        full_key = f"{self._prefix}/{key}"
        if not self._store.check([full_key]):
            return None
        signed_value = self._store.get(full_key)
        content = signed_value[_DIGEST_CHARS:]
        if not hmac.compare_digest(signed_value, self._signed(full_key, content)):
            raise UnverifiedError(key)
        return json.loads(content)

    def wait_for(self, key: str, *, timeout_s: float) -> Any:
        """Return the value once there is one. Raises TimeoutError."""
        # `wait` of torch's stores prints a warning at each time-out, and doesn't react to Ctrl-C.
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_S
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            # The pauses grow, since thousands of ranks ask one store.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONG_POLL_S)
        return value

    def set(self, key: str, value: Any) -> None:
        """Set the value; other processes see it on return, even if this one ends then."""
        full_key = f"{self._prefix}/{key}"
        content = json.dumps(value).encode()
        self._store.set(full_key, self._signed(full_key, content).decode())
        # `set` alone doesn't wait until the store has read the value; a second call does.
        self._store.check([full_key])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return self._store.add(f"{self._prefix}/{key}", amount)

    def request_stop(self, signal_number: int) -> None:
        """Ask all ranks to stop together; the first request counts."""
        if self.get("stop/signal") is None:
            self.set("stop/signal", signal_number)

    def _signed(self, full_key: str, content: bytes) -> bytes:
        """Return the content behind the hexadecimal HMAC of the key and itself."""
        digest = hmac.new(self._secret, f"{full_key} ".encode() + content, hashlib.sha256)
        return digest.hexdigest().encode() + content


def connect(host: str, port: int, *, timeout_s: float) -> Store:
    """Return a new connection to the run's store; a call that waits blocks no other connection.

    Raises DistError if there is no answer in time.
    """
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_run_store(attempt: int) -> RunStore:
    """Connect to the store at MASTER_ADDR:MASTER_PORT."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return RunStore(connect(address, port, timeout_s=STORE_TIMEOUT_S), attempt=attempt)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address `host` of this machine, and on no other. Port 0 takes a free one.

    It listens on all addresses if `host` is a name that leads to loopback here, as a machine's own name does on Debian:
    nothing says by which address the other nodes know it. Raises OSError if the port is taken or the address is
    another machine's.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # If there are addresses of both families, all clients try IPv4.
    ipv4_addresses = [entry for entry in addresses if entry[0] == socket.AF_INET]
    family, _, _, _, address = (ipv4_addresses or addresses)[0]

    number, _, _scope = str(address[0]).partition("%")
    is_loopback = ipaddress.ip_address(number).is_loopback
    if is_loopback and host not in (address[0], "localhost"):
        address = ("", port)
    return socket.create_server(address, family=family, backlog=_BACKLOG)


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
    """Host a store on a listening socket that `host` reaches, for as long as what is returned exists.

    The store takes over the socket and closes it.
    """
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call in a thread that may be left behind, unlike those of an executor."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return future


def call_with_deadline(call: Callable[[], T], *, timeout_s: float = _CALL_TIMEOUT_S) -> T:
    """Make a call to the store and return its result. Raises StoreGoneError if it times out or raises RuntimeError."""
    future = call_in_thread(call)
    if not wait([future], timeout=timeout_s).done:
        raise StoreGoneError
    try:
        return future.result()
    except RuntimeError as error:
        raise StoreGoneError from error
