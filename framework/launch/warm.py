"""The parent's side of the fork server: start it before anything slow, ask it for processes, hear of their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from framework.errors import LaunchError
from framework.hardware import openmp_environment
from framework.launch.wire import Channel, Message

# What libraries read when they are loaded, set where the user hasn't. A BLAS pool in the server would be threads lost
# at every fork.
_LOAD_TIME_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_END_TIMEOUT_S = 5.0

_PRELOAD = ("torch", "torch.distributed")  # of a server that is started for what begins at once


@dataclass(frozen=True)
class Child:
    """A process to fork: `entry` ("module:function") is called as `function(arguments, fd)`."""

    key: str
    entry: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None  # where its output goes; None keeps the parent's
    terminal: bool = False  # output goes to the terminal as well


@final
class WarmServer:
    """A running fork server. `close` ends it and every child it has."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel,
        *,
        environment: Mapping[str, str],
        load_time: Iterable[str] = (),
    ) -> None:
        self._process = process
        self._channel = channel
        self._load_time = frozenset(load_time)  # names of what was set here
        self._environment = dict(environment)  # what the server, and so every child, started with

    @staticmethod
    def start(preload: Sequence[str]) -> WarmServer:
        """Start the server; it begins to import `preload` at once. Takes milliseconds."""
        channel, theirs = Channel.pair()
        load_time = {**_LOAD_TIME_ENVIRONMENT, **openmp_environment()}
        environment = {**load_time, **os.environ}
        # A session of its own: Ctrl-C at the terminal reaches the parent alone, which decides for all.
        process = subprocess.Popen(
            [sys.executable, "-m", "framework.launch.fork_server", str(theirs.fileno()), str(os.getpid()), *preload],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        return WarmServer(process, channel, environment=environment, load_time=load_time.keys())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        return self._channel.fileno()

    def load(self, names: Sequence[str]) -> None:
        """Have the server import what is left of its own and these, before it does what is asked of it next."""
        self._send({"op": "load", "names": list(names)})

    def spawn(self, child: Child, *, fd: int | None = None) -> None:
        """Ask for a child in this process's present environment and folder. `fd` is passed on to it."""
        wanted = {**self._environment, **os.environ, **child.environment}
        self._send(
            {
                "op": "spawn",
                "key": child.key,
                "entry": child.entry,
                "arguments": dict(child.arguments),
                "environment": {k: v for k, v in wanted.items() if self._environment.get(k) != v},
                "unset": [k for k in self._environment if k not in os.environ and k not in self._load_time],
                "cwd": str(Path.cwd()),
                "sys_path": sys.path,
                "argv": sys.argv,
                "log": None if child.log is None else str(child.log),
                "terminal": child.terminal,
                "takes_fd": fd is not None,
            },
            fds=() if fd is None else (fd,),
        )

    def kill(self, key: str, signal_number: signal.Signals) -> None:
        """Send a signal to a child, if it is still there: only who reaps a process can be sure of its number."""
        self._send({"op": "kill", "key": key, "signal": int(signal_number)})

    def events(self) -> Iterator[Message]:
        """Events that have arrived; waits for at least one. Raises LaunchError when the server is gone."""
        try:
            yield from self._channel.receive_ready()
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def close(self) -> None:
        """End the server and every child, and wait for the server. May be called twice."""
        self._channel.close()
        if not sys.platform.startswith("linux"):  # there no kernel ends its children with it: it does so itself
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def _send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, fds=fds)
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> LaunchError:
        with suppress(subprocess.TimeoutExpired):  # its end of the connection is closed before it can be reaped
            self._process.wait(_END_TIMEOUT_S)
        status = self._process.returncode
        told = "it hasn't left yet" if status is None else f"its exit status is {status}"
        return LaunchError(
            f"The fork server (pid {self._process.pid}) ended, and the run with it; {told}. "
            "If its own output above says nothing, the system may have been out of memory."
        )


@contextmanager
def warm_server(given: WarmServer | None) -> Iterator[WarmServer]:
    """The server that was given, if it lives, or else a new one, closed at the end."""
    if given is not None and given.alive:
        yield given
        return
    server = WarmServer.start(_PRELOAD)
    try:
        yield server
    finally:
        server.close()
