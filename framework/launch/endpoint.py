"""Where a run's store is hosted and found: listening there, and whether somebody does. Without torch."""

from __future__ import annotations

import socket
import time

LOOPBACK = "127.0.0.1"
PROBE_S = 1.0

_LOOPBACKS = (LOOPBACK, "localhost", "::1")
_BACKLOG = 4096
_POLL_S = 0.1


def listen(host: str | None, port: int) -> socket.socket:
    """A listening socket: on this machine's loopback for None or an address of it, else on all its addresses.

    Port 0 takes a free one. Raises OSError where the port can't be had.
    """
    if host is None or host in _LOOPBACKS:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def await_listener(host: str, port: int, *, timeout_s: float) -> str | None:
    """Wait until somebody listens there; gives why nobody could be reached in time, None where somebody is there.

    To be asked before a client of torch's, which prints a warning for each try that fails.
    """
    deadline = time.monotonic() + timeout_s
    while (reason := probe(host, port)) is not None:
        if time.monotonic() > deadline:
            return reason
        time.sleep(_POLL_S)
    return None


def probe(host: str, port: int) -> str | None:
    """Why nobody can be reached; None where somebody listens. Waits for `PROBE_S` at most, once the name is known."""
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
