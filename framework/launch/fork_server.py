"""The fork server: a process that loads torch and other slow imports, and forks children on request.

It starts before the configuration is read, so ranks start with torch loaded. The fork server of
Python's multiprocessing can't do this: it loads nothing after its start, and its children have the environment of that
time, not the parent's present one.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn, final

from framework.errors import FrameworkError, LaunchError, RunError
from framework.launch.child import Child, Message, run_child
from framework.system.hardware import openmp_environment
from framework.system.parent_death import die_with_parent
from framework.system.signals import STOP_SIGNALS, catching_signals

# What ranks need, the heaviest first.
PRELOAD = (
    "torch",
    "torch.distributed",
    "framework.training.engine",
    "framework.jobs.preflight.rank",
    "rich.progress",
    "numpy.random",
)
_PRELOAD = PRELOAD[:2]  # by a server that is started when a process is needed at once
_END_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0  # only a process in an uninterruptible system call outlives SIGKILL for so long


@final
class ForkServer:
    """A running fork server. `close` ends it and all its children."""

    def __init__(self, preload: Sequence[str]) -> None:
        """Start the server, which begins to import `preload` at once. Takes milliseconds."""
        # Libraries read these when they are loaded; the user's own values win. A BLAS thread pool would not survive a
        # fork.
        self._defaults = {"OPENBLAS_NUM_THREADS": "1", **openmp_environment()}
        self._connection, theirs = Pipe()
        # A session of its own: Ctrl-C at the terminal reaches only the parent, which decides for all.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "framework.launch.fork_server", str(theirs.fileno()), str(os.getpid()), *preload],
            pass_fds=[theirs.fileno()],
            env={**self._defaults, **os.environ},
            start_new_session=True,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        return self._connection.fileno()

    def load(self, names: Sequence[str]) -> None:
        """Have the server import the rest of its preload and these names before it serves the next request."""
        self._send({"op": "load", "names": list(names)})

    def spawn(self, child: Child, *, fds: Sequence[int] = ()) -> None:
        """Have a child forked that gets this process's present environment and working directory, and `fds`."""
        self._send(
            {
                "op": "spawn",
                "child": child,
                "environment": {**self._defaults, **os.environ, **child.environment},
                "cwd": Path.cwd(),
                "sys_path": sys.path,
                "argv": sys.argv,
                "num_fds": len(fds),
            },
            fds=fds,
        )

    def kill(self, key: str) -> None:
        """Send SIGKILL to a child if it still runs: only the process that reaps it can be sure of its pid."""
        self._send({"op": "kill", "key": key})

    def next_exit(self) -> Message:
        """Return how the next child ended; waits for it. Raises LaunchError if the server is gone."""
        try:
            exited: Message = self._connection.recv()
            return exited
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def wait_for_exit(self, key: str, *, timeout_s: float) -> bool:
        """Wait for the end of one child, dropping other events; return False on a time-out."""
        deadline = time.monotonic() + timeout_s
        while select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if self.next_exit()["key"] == key:
                return True
        return False

    def close(self) -> None:
        """End the server and every child, and wait for the server. May be called twice."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            self._connection.send(message)
            for fd in fds:
                send_handle(self._connection, fd, self._process.pid)
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> LaunchError:
        with suppress(subprocess.TimeoutExpired):  # its end of the connection is closed before it can be reaped
            self._process.wait(_END_TIMEOUT_S)
        status = self._process.returncode
        ending = "it hasn't left yet" if status is None else f"its exit status is {status}"
        return LaunchError(
            f"The fork server (pid {self._process.pid}) ended, and the run with it; {ending}. "
            "If its own output above says nothing, the system may have been out of memory."
        )


@contextmanager
def running_fork_server(given: ForkServer | None) -> Iterator[ForkServer]:
    """Yield the given server if it is alive, otherwise a new one that is closed at the end.

    So if the server of a sweep dies, only the job fails that runs at that time.
    """
    if given is not None and given.alive:
        yield given
        return
    with closing(ForkServer(_PRELOAD)) as server:
        yield server


# Calling one function in a process that has torch


def call_in_child(
    fork_server: ForkServer | None,
    entry: str,
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
    purpose: str = "look into the model",
) -> dict[str, Any]:
    """Call `entry` ("module:function") as `entry(arguments)` in a forked child; return its result, plain values.

    Args:
        fork_server: the server to fork from; a new one is started if it is None or has ended.
        purpose: what the child is to do, for messages.

    Raises:
        FrameworkError: the one that the child raised.
        RunError: the child raised anything else; its traceback is on stderr, as is what the child prints.
        LaunchError: it takes longer than `timeout_s`. No child is left in any case.
    """
    child = Child("framework.launch.fork_server:send_result", {"entry": entry, "arguments": arguments})
    connection, theirs = Pipe()
    with running_fork_server(fork_server) as server, connection:
        with theirs:
            server.spawn(child, fds=[theirs.fileno()])
        try:
            if not connection.poll(timeout_s):
                raise LaunchError(
                    f"The process that was to {purpose} gave no answer within backend.init_timeout={timeout_s:g} s. "
                    "Building the model or the data may be slow here; raise it."
                )
            answer: dict[str, Any] | FrameworkError = connection.recv()
        except EOFError:
            raise RunError(f"The process that was to {purpose} ended without an answer; its error is above.") from None
        finally:
            server.kill(child.key)
            server.wait_for_exit(child.key, timeout_s=_KILL_TIMEOUT_S)
    if isinstance(answer, FrameworkError):
        raise answer
    return answer


def send_result(arguments: Mapping[str, Any], fd: int) -> int:
    """Call the function in the child; send its result, or the FrameworkError it raises, through the connection `fd`."""
    os.dup2(2, 1)  # what the user's code prints: the parent's own output has only the result
    answer: dict[str, Any] | FrameworkError
    try:
        answer = pkgutil.resolve_name(arguments["entry"])(arguments["arguments"])
    except FrameworkError as error:
        answer = error
    sys.stdout.flush()  # the parent kills this process once it has the answer
    with Connection(fd) as connection:
        connection.send(answer)
    return 0


# The server's own process: python -m framework.launch.fork_server FD PARENT_PID NAME...


@final
class ForkServerProcess:
    """The server itself: forks children on request and reports their ends.

    It runs no tensor operation and touches no GPU, so its children are clean. It is single-threaded: between two
    imports it looks for requests. Requests on the connection:

        {"op": "spawn", "child": Child, "environment", "cwd", "sys_path", "argv", "num_fds"}, then file descriptors
        {"op": "load", "names": [...]}: import the rest of the preload and these before serving the next request
        {"op": "kill", "key": str}

    It reports the end of every child: {"key", "pid", "status", "time"}. The status is an exit status, or minus a signal
    number. It leaves when the parent closes the connection.
    """

    def __init__(self, connection: Connection, *, preload: Sequence[str]) -> None:
        self._connection = connection
        self._preload = list(preload)
        self._pids: dict[str, int] = {}  # by key, of children not yet reaped

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
                    else:  # kill
                        pid = self._pids.get(message["key"])
                        if pid is not None:  # it hasn't been reaped
                            os.kill(pid, signal.SIGKILL)
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
        self._pids[key] = pid
        return pid

    def _reap(self) -> None:
        for key, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[key]
                self._report(key, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _report(self, key: str, *, pid: int, status: int) -> None:
        self._connection.send({"key": key, "pid": pid, "status": status, "time": time.time()})


def main(argv: list[str]) -> NoReturn:
    """Serve until the parent closes the connection; never returns. A name is a module, or something in one."""
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
