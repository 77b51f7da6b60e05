"""The server of one run: a process, forked from the fork server, that forks the run's ranks and ends them all.

It adopts the ranks' orphans (it is a "subreaper"), so these end with the run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, final

from framework.launch.child import Child, Message, run_child
from framework.launch.forking import fork, lost_server, receive_fds, send
from framework.system.hardware import own_cores
from framework.system.orphans import ENDS_WITHIN_S, adopt_orphans, end_descendants, left_behind
from framework.system.signals import STOP_SIGNALS, catching_signals

_NAME = "process that forks the ranks"


@final
class RunServer:
    """The command's connection to the server of a run.

    Call `end`, wait for its answer, then call `close`. If the connection is closed without `end`, or this process dies,
    the server ends all of its descendants by itself.
    """

    def __init__(self, connection: Connection, *, defaults: Mapping[str, str]) -> None:
        """Use a connection to a server.

        Args:
            defaults: Environment variables of the children, for those that the user hasn't set.
        """
        self._connection = connection
        self._defaults = defaults

    def fileno(self) -> int:
        return self._connection.fileno()

    def spawn(self, child: Child, *, fds: Sequence[int] = ()) -> None:
        """Have a child forked that gets this process's present environment, working directory and cores, and `fds`."""
        request = {
            "op": "spawn",
            "child": child,
            "environment": {**self._defaults, **os.environ, **child.environment},
            "cores": child.cores or own_cores(),
            "cwd": Path.cwd(),
            "sys_path": sys.path,
            "argv": sys.argv,
            "num_fds": len(fds),
        }
        self._send(request, fds=fds)

    def kill(self, key: str, *, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to a child if it still runs: only the process that reaps it can be sure of its pid."""
        self._send({"op": "kill", "key": key, "signal": signal_number})

    def end(self) -> None:
        """Request the end of all children and their orphans. The last event answers: {"left": [process, …]}."""
        self._send({"op": "end"})

    def next_event(self) -> Message:
        """Return how the next child ended, or the answer to `end`; waits. Raises LaunchError if the server is gone."""
        try:
            event: Message = self._connection.recv()
            return event
        except (EOFError, OSError) as error:
            raise lost_server(_NAME) from error

    def await_end(self) -> list[str]:
        """Call `end`, drop other events, and return descriptions of what the children left behind."""
        self.end()
        deadline = time.monotonic() + ENDS_WITHIN_S
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self], [], [], left_s)
            if not readable:
                return []
            event = self.next_event()
            if "left" in event:
                return list(event["left"])

    def close(self) -> None:
        """Close the connection; the server then ends all that it has started. May be called twice."""
        self._connection.close()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            send(self._connection, message, fds=fds)
        except OSError as error:
            raise lost_server(_NAME) from error


# In the server's own process


def serve_run(fd: int, *, command_pid: int) -> NoReturn:
    """Serve one run in a fork of the fork server; if the command ends first, end all that is left of the run.

    Args:
        fd: The file descriptor of the connection to the command.
    """
    adopt_orphans()
    server_pid = os.getpid()
    command = None
    # The command may have ended already, or the kernel is older than 5.3.
    with suppress(OSError, AttributeError):
        command = os.pidfd_open(command_pid)

    with Connection(fd) as connection:
        server = _Server(connection, command=command)
        try:
            message, fds = server.serve()
        except (EOFError, OSError):
            _leave_without_command(server)

    # This is a child from here on.
    if command is not None:
        os.close(command)
    run_child(message, fds=fds, parent_pid=server_pid)


def _leave_without_command(server: _Server) -> NoReturn:
    left = server.end_all()
    if left:
        print(left_behind(left), file=sys.stderr, flush=True)
    os._exit(0)


@final
class _Server:
    """Forks children on request, and tells the command how each of them ended.

    It runs no tensor operation and touches no GPU, so its children are clean, and it is single-threaded. Requests on
    the connection:

        {"op": "spawn", "child": Child, "environment", "cores", "cwd", "sys_path", "argv", "num_fds"}, then file
            descriptors
        {"op": "kill", "key": str, "signal": int}
        {"op": "end"}: end all below this process, send {"left": [...]}, and leave

    It sends how every child ended: {"key", "pid", "status", "time"}. The status is an exit status, or minus a signal
    number.

    Args:
        command: a pidfd of the command. The command's end of the connection may live on in a process that it forked.
    """

    def __init__(self, connection: Connection, *, command: int | None) -> None:
        self._connection = connection
        self._command = command
        # The keys of the children that aren't reaped yet, by pid. Other children are orphans that this process has
        # adopted.
        self._keys: dict[int, str] = {}
        # Descriptions of the processes that the children left behind.
        self._left: list[str] = []

    def serve(self) -> tuple[Message, list[int]]:
        """Serve requests. Return only in a forked child: what it is to do, and its file descriptors.

        Raises EOFError or OSError when the command has closed its end or has ended.
        """
        # If it was ignored, the kernel would reap the children.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The command decides for all, even if a scheduler signals every process of a job.
        with catching_signals((signal.SIGCHLD, *STOP_SIGNALS)) as signals:
            watched: list[Any] = [self._connection, signals]
            if self._command is not None:
                watched.append(self._command)
            while True:
                ready, _, _ = select.select(watched, [], [])
                if signals in ready:
                    signals.take()
                    self._reap()
                if self._connection in ready:
                    message: Message = self._connection.recv()
                    if message["op"] == "spawn":
                        fds = receive_fds(self._connection, message["num_fds"])
                        if self._spawn(message["child"].key) == 0:
                            return message, fds
                        for fd in fds:
                            os.close(fd)
                    else:
                        self._handle(message)
                elif self._command in ready:
                    raise EOFError

    def end_all(self) -> list[str]:
        """Kill the children and end the processes that they left behind; return descriptions of these.

        Called a second time if the command ended before it got the answer of the first one.
        """
        for pid in self._keys:
            os.kill(pid, signal.SIGKILL)
        # `end_descendants` reaps them, and then their pids may be those of other processes.
        self._keys.clear()
        self._left += end_descendants()
        return self._left

    def _handle(self, message: Message) -> None:
        if message["op"] == "end":
            self._connection.send({"left": self.end_all()})
            os._exit(0)
        assert message["op"] == "kill"
        for pid, key in self._keys.items():
            # It hasn't been reaped, so the pid is still its own.
            if key == message["key"]:
                os.kill(pid, message["signal"])

    def _spawn(self, key: str) -> int | None:
        """Return the pid of a new child, 0 in the child, None if there can't be one; that counts as its end."""
        pid = fork()
        if pid is None:
            self._send_end(key, pid=0, status=1)
        elif pid > 0:
            self._keys[pid] = key
        return pid

    def _reap(self) -> None:
        # There may be no children.
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                key = self._keys.pop(pid, None)
                if key is not None:
                    self._send_end(key, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _send_end(self, key: str, *, pid: int, status: int) -> None:
        self._connection.send({"key": key, "pid": pid, "status": status, "time": time.time()})
