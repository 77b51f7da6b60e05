"""The fork server: a process that loads torch and other slow imports, and forks a server for each run.

It starts before the configuration is read, so ranks start with torch loaded. The fork server of Python's
multiprocessing can't do this: it loads nothing after its start, and its children have the environment of that time, not
the parent's present one.
"""

from __future__ import annotations

import os
import pkgutil
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, final

from framework.errors import FrameworkError, LaunchError, RunError
from framework.launch.child import Child, Message
from framework.launch.forking import fork, lost_server, receive_fds, send
from framework.launch.run_server import RunServer, serve_run
from framework.system.hardware import openmp_environment
from framework.system.orphans import left_behind
from framework.system.output import tolerant_output
from framework.system.signals import STOP_SIGNALS, catching_signals, die_with_parent, shown_signal

# The modules that ranks need, the heaviest first.
PRELOAD = (
    "torch",
    "torch.distributed",
    "framework.engine.train",
    "framework.jobs.preflight.rank",
    "rich.progress",
    "numpy.random",
)
# The preload of a server that is started when a process is needed at once.
_SHORT_PRELOAD = PRELOAD[:2]
_END_TIMEOUT_S = 5.0
# How many file descriptors follow each request to the server.
_NUM_FDS = {"load": 0, "connect": 1, "fork": 1}

_ROOT = Path(__file__).resolve().parents[2]
# Not by `-m`, which would find a folder of the user's called framework first. Only this import takes another path.
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from framework.launch.fork_server import main; "
    "del sys.path[0]; main(sys.argv[1:])"
)


class ForkServer:
    """A process's connection to a fork server, from which a `RunServer` is forked for each run."""

    def __init__(self, connection: Connection, *, defaults: Mapping[str, str]) -> None:
        """Use a connection to a server.

        Args:
            defaults: Environment variables of the children, for those that the user hasn't set.
        """
        self._connection = connection
        self._defaults = defaults

    @property
    def defaults(self) -> Mapping[str, str]:
        return self._defaults

    @property
    def alive(self) -> bool:
        """False if the server is known to have ended."""
        return True

    def load(self, names: Sequence[str]) -> None:
        """Have the server import the rest of its preload and these names before it serves the next request."""
        self._send({"op": "load", "names": list(names)})

    def fork(self) -> RunServer:
        """Fork a server for one run, with all modules that are loaded by now."""
        ours, theirs = Pipe()
        with theirs:
            self._send({"op": "fork", "command": os.getpid()}, fds=[theirs.fileno()])
        return RunServer(ours, defaults=self._defaults)

    def share(self) -> Connection:
        """Return a further connection to the server, for another process to make a ForkServer of."""
        ours, theirs = Pipe()
        with theirs:
            self._send({"op": "connect"}, fds=[theirs.fileno()])
        return ours

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._connection.close()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            send(self._connection, message, fds=fds)
        except OSError as error:
            raise lost_server("fork server") from error


@final
class OwnForkServer(ForkServer):
    """The connection of the process that has started the server, which ends with it. `close` ends the server."""

    def __init__(self, preload: Sequence[str]) -> None:
        """Start the server, which begins to import `preload` at once. Takes milliseconds."""
        # Libraries read these when they are loaded; the user's own values win. A BLAS thread pool would not survive a
        # fork.
        defaults = {"OPENBLAS_NUM_THREADS": "1", **openmp_environment()}
        connection, theirs = Pipe()
        super().__init__(connection, defaults=defaults)
        # A session of its own: Ctrl-C at the terminal reaches only the parent, which decides for all.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_ROOT), str(theirs.fileno()), str(os.getpid()), *preload],
            pass_fds=[theirs.fileno()],
            env={**defaults, **os.environ},
            start_new_session=True,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and wait for it; servers that were forked from it keep running. May be called twice."""
        super().close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            send(self._connection, message, fds=fds)
        except OSError as error:
            # Its end of the connection is closed before it can be reaped.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
            raise lost_server(f"fork server (pid {self._process.pid})", status=self._process.returncode) from error


@contextmanager
def running_fork_server(server: ForkServer | None) -> Iterator[ForkServer]:
    """Yield the server if it is alive, otherwise a new one that is closed at the end.

    So if the server of a sweep dies, only the job fails that runs at that time.
    """
    if server is not None and server.alive:
        yield server
        return
    with closing(OwnForkServer(_SHORT_PRELOAD)) as new_server:
        yield new_server


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
            status = server.next_event()["status"]
            how = "ended without an answer; its error is above"
            if status < 0:
                how = f"was killed by {shown_signal(-status)}"
            raise RunError(f"The process that was to {purpose} {how}.") from None
        finally:
            left = server.await_end()
            if left:
                print(left_behind(left), file=sys.stderr, flush=True)
    if isinstance(answer, FrameworkError):
        raise answer
    return answer


def send_result(arguments: Mapping[str, Any], fd: int) -> int:
    """Call the function in the child; send its result, or the FrameworkError it raises, through the connection `fd`."""
    # What the user's code prints goes to stderr: the parent's own output has only the result.
    os.dup2(2, 1)
    answer: dict[str, Any] | FrameworkError
    try:
        answer = pkgutil.resolve_name(arguments["entry"])(arguments["arguments"])
    except FrameworkError as error:
        answer = error
    # The parent kills this process once it has the answer.
    sys.stdout.flush()
    with Connection(fd) as connection:
        connection.send(answer)
    return 0


# The server's own process: python -m framework.launch.fork_server FD PARENT_PID NAME...


def main(argv: list[str]) -> NoReturn:
    """Serve until the parent closes the connection; never returns. A name is a module, or something in one."""
    fd = int(argv[0])
    parent_pid = int(argv[1])
    die_with_parent(parent_pid)
    # Of all processes that are forked from this one, too.
    with tolerant_output():
        try:
            with Connection(fd) as connection:
                command_pid, run_fd = _Server(connection, preload=argv[2:]).serve()
        except (EOFError, OSError):
            # Unloading torch would take most of a second.
            os._exit(0)
        # This is the server of a run from here on.
        serve_run(run_fd, command_pid=command_pid)


@final
class _Server:
    """Imports modules, and between two imports looks for requests. It is single-threaded and touches no GPU.

    Requests on a connection:

        {"op": "load", "names": [...]}: import the rest of the preload and these before serving the next request
        {"op": "fork", "command": pid}, then a connection's file descriptor: fork a server for one run
        {"op": "connect"}, then a connection's file descriptor: serve requests on this one, too

    Args:
        connection: that of the process which started this one. The server ends when it is closed.
    """

    def __init__(self, connection: Connection, *, preload: Sequence[str]) -> None:
        self._connection = connection
        # Those of other processes, such as the trials of a sweep.
        self._shared: list[Connection] = []
        self._preload = list(preload)

    def serve(self) -> tuple[int, int]:
        """Serve requests. Return only in the forked server of a run: the command's pid, and its file descriptor.

        Raises EOFError or OSError when the command has closed its end.
        """
        # If it was ignored, the kernel would reap the children.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The command decides for all, even if a scheduler signals every process of a job.
        with catching_signals((signal.SIGCHLD, *STOP_SIGNALS)) as signals:
            while True:
                watched: list[Any] = [signals, self._connection, *self._shared]
                # With something left to import, it only looks for requests, and doesn't wait for them.
                timeout_s = 0 if self._preload else None
                ready, _, _ = select.select(watched, [], [], timeout_s)
                if signals in ready:
                    signals.take()
                    _reap()
                for connection in ready:
                    if connection is signals:
                        continue
                    run = self._handle(connection)
                    if run is not None:
                        return run
                if not ready and self._preload:
                    self._load_next()

    def _handle(self, connection: Connection) -> tuple[int, int] | None:
        """Handle a request. Return something only in the forked server of a run, as `serve` does."""
        try:
            message: Message = connection.recv()
            fds = receive_fds(connection, _NUM_FDS[message["op"]])
        except (EOFError, OSError):
            if connection is self._connection:
                raise
            self._shared.remove(connection)
            connection.close()
            return None

        if message["op"] == "load":
            self._load(message["names"])
        elif message["op"] == "connect":
            self._shared.append(Connection(fds[0]))
        else:
            assert message["op"] == "fork"
            if fork() == 0:
                for shared in self._shared:
                    shared.close()
                return message["command"], fds[0]
            os.close(fds[0])
        return None

    def _load(self, names: Sequence[str]) -> None:
        self._preload += names
        while self._preload:
            self._load_next()

    def _load_next(self) -> None:
        name = self._preload.pop(0)
        try:
            pkgutil.resolve_name(name)
        except Exception:
            # Whatever it is (a missing library is an OSError), it isn't reported here: the child that needs the module
            # imports it again, and its own failure has the error.
            self._preload.clear()


def _reap() -> None:
    """Reap the servers of runs that have ended."""
    # There may be no children.
    with suppress(ChildProcessError):
        pid = -1
        while pid != 0:
            pid, _ = os.waitpid(-1, os.WNOHANG)
