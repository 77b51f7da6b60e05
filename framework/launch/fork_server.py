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
from framework.system.orphans import ENDS_WITHIN_S, adopt_orphans, end_descendants, left_behind
from framework.system.signals import STOP_SIGNALS, catching_signals, die_with_parent

# What ranks need, the heaviest first.
PRELOAD = (
    "torch",
    "torch.distributed",
    "framework.engine.train",
    "framework.jobs.preflight.rank",
    "rich.progress",
    "numpy.random",
)
_PRELOAD = PRELOAD[:2]  # by a server that is started when a process is needed at once
_END_TIMEOUT_S = 5.0


@final
class ForkServer:
    """A running fork server, from which a `RunServer` is forked for each run. `close` ends it."""

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

    def load(self, names: Sequence[str]) -> None:
        """Have the server import the rest of its preload and these names before it serves the next request."""
        self._send({"op": "load", "names": list(names)})

    def fork(self) -> RunServer:
        """Fork a server for one run, with all modules that are loaded by now."""
        ours, theirs = Pipe()
        with theirs:
            self._send({"op": "fork", "command": os.getpid()}, fds=[theirs.fileno()])
        return RunServer(ours, defaults=self._defaults)

    def close(self) -> None:
        """End the server and wait for it; servers that were forked from it keep running. May be called twice."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            _send(self._connection, message, fds=fds)
        except OSError as error:
            with suppress(subprocess.TimeoutExpired):  # its end of the connection is closed before it can be reaped
                self._process.wait(_END_TIMEOUT_S)
            raise _lost(f"fork server (pid {self._process.pid})", status=self._process.returncode) from error


@final
class RunServer:
    """A fork server for the ranks of one run. It adopts the ranks' orphans, so these end with the run.

    Call `end`, wait for its answer, then call `close`. If the connection is closed without `end`, or this process dies,
    the server ends all of its descendants by itself.
    """

    def __init__(self, connection: Connection, *, defaults: Mapping[str, str]) -> None:
        self._connection = connection
        self._defaults = defaults  # variables, for those that the user hasn't set

    def fileno(self) -> int:
        return self._connection.fileno()

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

    def end(self) -> None:
        """Request the end of all children and their orphans. The last event answers: {"left": [process, …]}."""
        self._send({"op": "end"})

    def next_event(self) -> Message:
        """Return how the next child ended, or the answer to `end`; waits. Raises LaunchError if the server is gone."""
        try:
            event: Message = self._connection.recv()
            return event
        except (EOFError, OSError) as error:
            raise _lost("process that forks the ranks") from error

    def await_end(self) -> list[str]:
        """Call `end`, drop other events, and return descriptions of what the children left behind."""
        self.end()
        deadline = time.monotonic() + ENDS_WITHIN_S
        while select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
            event = self.next_event()
            if "left" in event:
                return list(event["left"])
        return []

    def close(self) -> None:
        """Close the connection; the server then ends all that it has started. May be called twice."""
        self._connection.close()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            _send(self._connection, message, fds=fds)
        except OSError as error:
            raise _lost("process that forks the ranks") from error


def _send(connection: Connection, message: Message, *, fds: Sequence[int]) -> None:
    connection.send(message)
    for fd in fds:
        send_handle(connection, fd, None)  # the receiver's pid is for other systems


def _lost(what: str, *, status: int | None = None) -> LaunchError:
    ending = "" if status is None else f"; its exit status is {status}"
    return LaunchError(
        f"The {what} ended, and the run with it{ending}. "
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
    with running_fork_server(fork_server) as parent, closing(parent.fork()) as server, connection:
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
            if left := server.await_end():
                print(left_behind(left), file=sys.stderr, flush=True)
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


# The servers' own processes: python -m framework.launch.fork_server FD PARENT_PID NAME...


@final
class ForkServerProcess:
    """The server itself: forks children on request and reports their ends.

    It runs no tensor operation and touches no GPU, so its children are clean. It is single-threaded: between two
    imports it looks for requests. Requests on the connection:

        {"op": "load", "names": [...]}: import the rest of the preload and these before serving the next request
        {"op": "fork", "command": pid}, then a connection's file descriptor: fork a server for one run
        {"op": "spawn", "child": Child, "environment", "cwd", "sys_path", "argv", "num_fds"}, then file descriptors
        {"op": "kill", "key": str}
        {"op": "end"}: of a run's server: end all below this process, send {"left": [...]}, and leave

    It reports the end of every child it has spawned: {"key", "pid", "status", "time"}. The status is an exit status, or
    minus a signal number. Other children are orphans that it has adopted.

    Args:
        command: a pidfd of the command, for a run's server; None: it dies with its parent anyway.
    """

    def __init__(self, connection: Connection, *, preload: Sequence[str], command: int | None = None) -> None:
        self._connection = connection
        self._preload = list(preload)
        self._command = command
        self._keys: dict[int, str] = {}  # by pid, of children not yet reaped

    def serve(self) -> tuple[Message, list[int]]:
        """Serve requests. Return only in a forked child: what it is to do, and its file descriptors.

        Raises EOFError or OSError when the command has closed its end or has ended.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, the kernel would reap the children
        # The command decides for all, even if a scheduler signals every process of a job.
        with catching_signals((signal.SIGCHLD, *STOP_SIGNALS)) as signals:
            watched: list[Any] = [self._connection, signals]
            if self._command is not None:
                watched.append(self._command)
            while True:
                ready, _, _ = select.select(watched, [], [], 0 if self._preload else None)
                if signals in ready:
                    signals.take()
                    self._reap()
                if self._connection in ready:
                    forked = self._handle(self._connection.recv())
                    if forked is not None:
                        return forked
                elif self._command in ready:
                    raise EOFError  # its end of the connection may live on in a process that it forked
                elif self._preload:
                    self._preload_next()

    def _handle(self, message: Message) -> tuple[Message, list[int]] | None:
        """Serve one request. Return what a child is to do in the child, None in the server."""
        match message["op"]:
            case "spawn" | "fork":
                fds = [recv_handle(self._connection) for _ in range(message.get("num_fds", 1))]
                key = message["child"].key if message["op"] == "spawn" else None
                if self._fork(key) == 0:
                    return message, fds
                for fd in fds:
                    os.close(fd)
            case "load":
                self._preload += message["names"]
                while self._preload:
                    self._preload_next()
            case "kill":
                for pid, key in self._keys.items():
                    if key == message["key"]:  # it hasn't been reaped
                        os.kill(pid, signal.SIGKILL)
            case "end":
                self._connection.send({"left": self.end_all()})
                os._exit(0)
        return None

    def end_all(self) -> list[str]:
        """Kill the children and end the processes that they left behind; return descriptions of these."""
        for pid in self._keys:
            os.kill(pid, signal.SIGKILL)
        return end_descendants()

    def _preload_next(self) -> None:
        name = self._preload.pop(0)
        try:
            pkgutil.resolve_name(name)
        except Exception:
            # Not an error yet, whatever it is (a missing library is an OSError): the child that needs the module
            # imports it again and reports the error as its own failure.
            self._preload.clear()

    def _fork(self, key: str | None) -> int:
        """Return the pid of a new child, 0 in the child. Its end is reported with the key, if it has one."""
        gc.collect()
        gc.freeze()  # else the collector touches, and so copies, pages shared with the children
        with warnings.catch_warnings():
            # BLAS libraries may hold idle threads; they re-create them after a fork through pthread_atfork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:  # too many processes, or no memory for one more
                print(f"A process can't be started: {error}", file=sys.stderr, flush=True)
                if key is not None:
                    self._report(key, pid=0, status=1)
                return -1
        if key is not None:
            self._keys[pid] = key
        return pid

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # there are none
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                key = self._keys.pop(pid, None)
                if key is not None:
                    self._report(key, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _report(self, key: str, *, pid: int, status: int) -> None:
        self._connection.send({"key": key, "pid": pid, "status": status, "time": time.time()})


def main(argv: list[str]) -> NoReturn:
    """Serve until the parent closes the connection; never returns. A name is a module, or something in one."""
    fd, parent_pid, preload = int(argv[0]), int(argv[1]), argv[2:]
    die_with_parent(parent_pid)
    try:
        with Connection(fd) as connection:
            message, (fd,) = ForkServerProcess(connection, preload=preload).serve()
    except (EOFError, OSError):
        os._exit(0)  # unloading torch would take most of a second
    serve_run(fd, command_pid=message["command"])


def serve_run(fd: int, *, command_pid: int) -> NoReturn:
    """Serve one run in a fork of the server; if the command ends first, end all that is left of the run."""
    adopt_orphans()
    server_pid = os.getpid()
    command = None
    with suppress(OSError, AttributeError):  # the command has ended already, or the kernel is older than 5.3
        command = os.pidfd_open(command_pid)
    with Connection(fd) as connection:
        server = ForkServerProcess(connection, preload=(), command=command)
        try:
            message, fds = server.serve()
        except (EOFError, OSError):
            if left := server.end_all():
                with suppress(OSError):  # the terminal is gone
                    print(left_behind(left), file=sys.stderr, flush=True)
            os._exit(0)
    if command is not None:
        os.close(command)
    run_child(message, fds=fds, parent_pid=server_pid)


if __name__ == "__main__":
    main(sys.argv[1:])
