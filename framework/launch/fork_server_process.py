"""The fork server's own process: it loads torch and other slow imports, and forks children on request.

It starts before the configuration is read. It runs no tensor operation and touches no GPU, so its children are clean.
It is single-threaded: between two imports it looks for requests.

Run as `python -m framework.launch.fork_server_process FD PARENT_PID NAME...`; a name is a module, or something in one.
Requests on the connection FD:

    {"op": "spawn", "child": Child, "environment", "cwd", "sys_path", "argv", "num_fds"}, then file descriptors
    {"op": "load", "names": [...]}: import the rest of the preload and these before serving the next request
    {"op": "kill", "key": str}

The server reports the end of every child: {"key", "pid", "status", "time"}. The status is an exit status, or minus a
signal number. The server leaves when the parent closes the connection.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NoReturn, final

from framework.launch.child import run_child
from framework.launch.fork_server import Message
from framework.system.parent_death import die_with_parent
from framework.system.signals import STOP_SIGNALS, catching_signals


@final
class ForkServerProcess:
    """Forks children on request and reports their ends."""

    def __init__(self, connection: Connection, *, preload: Sequence[str]) -> None:
        self._connection = connection
        self._preload = list(preload)
        self._keys: dict[int, str] = {}  # pid → key, of children not yet reaped

    def serve(self) -> tuple[Message, list[int]]:
        """Serve requests. Return only in a forked child: what it is to run, and its file descriptors.

        Raises EOFError or OSError when the parent has closed its end.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, the kernel would reap the children
        # The parent decides for all, even if a scheduler signals every process of a job; it kills this one.
        with catching_signals((signal.SIGCHLD, *STOP_SIGNALS)) as signals:
            watched: list[Any] = [self._connection, signals]
            while True:
                ready, _, _ = select.select(watched, [], [], 0 if self._preload else None)
                if signals in ready:
                    signals.take()
                    self._reap()
                if self._connection in ready:
                    message: Message = self._connection.recv()
                    if message["op"] == "spawn":
                        fds = [recv_handle(self._connection) for _ in range(message["num_fds"])]
                        if self._fork(message["child"].key) == 0:
                            return message, fds
                        for fd in fds:
                            os.close(fd)
                    elif message["op"] == "load":
                        self._preload += message["names"]
                        while self._preload:
                            self._preload_next()
                    else:
                        self._kill(message["key"])
                elif self._preload:
                    self._preload_next()

    def _preload_next(self) -> None:
        name = self._preload.pop(0)
        try:
            pkgutil.resolve_name(name)
        except Exception:
            # Not an error yet, whatever it is (a missing library is an OSError): the child that needs the module
            # imports it again and reports the error as its own failure.
            self._preload.clear()

    def _fork(self, key: str) -> int:
        """Return the pid of a new child, 0 in the child."""
        gc.collect()
        gc.freeze()  # else the collector touches, and so copies, pages shared with the children
        with warnings.catch_warnings():
            # BLAS libraries may hold idle threads; they re-create them after a fork through pthread_atfork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:  # too many processes, or no memory for one more
                print(f"A process can't be started: {error}", file=sys.stderr, flush=True)
                self._report(key, pid=0, status=1)
                return -1
        self._keys[pid] = key
        return pid

    def _kill(self, key: str) -> None:
        for pid, its_key in self._keys.items():
            if its_key == key:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self._keys):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._report(self._keys.pop(pid), pid=pid, status=os.waitstatus_to_exitcode(status))

    def _report(self, key: str, *, pid: int, status: int) -> None:
        self._connection.send({"key": key, "pid": pid, "status": status, "time": time.time()})


def main(argv: list[str]) -> NoReturn:
    """Serve until the parent closes the connection; never returns."""
    fd, parent_pid, preload = int(argv[0]), int(argv[1]), argv[2:]
    die_with_parent(parent_pid)
    server_pid = os.getpid()
    try:
        with Connection(fd) as connection:
            message, fds = ForkServerProcess(connection, preload=preload).serve()
    except (EOFError, OSError):
        os._exit(0)  # unloading torch would take most of a second
    run_child(message, fds=fds, parent_pid=server_pid)


if __name__ == "__main__":
    main(sys.argv[1:])
