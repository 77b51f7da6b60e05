"""What the fork server and the servers of runs have in common: messages with file descriptors, and `os.fork`."""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from framework.errors import LaunchError
from framework.launch.child import Message


def send(connection: Connection, message: Message, *, fds: Sequence[int]) -> None:
    """Send a message, then file descriptors. Raises OSError if the other end is closed."""
    connection.send(message)
    for fd in fds:
        # The receiver's pid is for other systems.
        send_handle(connection, fd, None)


def receive_fds(connection: Connection, count: int) -> list[int]:
    return [recv_handle(connection) for _ in range(count)]


def lost_server(what: str, *, status: int | None = None) -> LaunchError:
    """Return the error for a server that has ended, with its exit status if that is known."""
    ending = ""
    if status is not None:
        ending = f"; its exit status is {status}"
    return LaunchError(
        f"The {what} ended, and the run with it{ending}. "
        "If its own output above says nothing, the system may have been out of memory."
    )


def fork() -> int | None:
    """Return the pid of a new child, 0 in the child; None if there are too many processes or no memory."""
    # Otherwise the collector would touch, and so copy, pages that the children share.
    gc.collect()
    gc.freeze()
    with warnings.catch_warnings():
        # BLAS libraries may hold idle threads; they re-create them after a fork through pthread_atfork.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            print(f"A process can't be started: {error}", file=sys.stderr, flush=True)
            return None
    if pid == 0:
        _leave_finalizers_to_parent()
    return pid


def _leave_finalizers_to_parent() -> None:
    """Have this child run only the `weakref.finalize` callbacks at its exit that it registers itself.

    Those of earlier objects are the parent's: they would remove its temporary folders, say. Those of torch's operator
    libraries take 30 ms.
    """
    # There is no public way to list them.
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        info.atexit = False
