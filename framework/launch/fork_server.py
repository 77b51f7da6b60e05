"""The fork server: one process, warm with the heavy imports, that forks ranks and keepers on request.

It is started before the configuration is read and loads modules meanwhile, runs no tensor operation and touches no GPU,
so what it forks is clean. It is single-threaded Python: between two imports it looks whether a request has come.

Run as `python -m framework.launch.fork_server FD PARENT_PID NAME...`; a name is a module's, or one in it. Requests on
the socket FD:

    {"op": "spawn", "key": str, "entry": "module:function", "arguments": {...}, "environment": {...}, "unset": [...],
     "cwd": str, "sys_path": [...], "argv": [...], "log": path or null, "terminal": bool, "takes_fd": bool}
    {"op": "load", "names": [...]}: these, after what is left of its own, before anything else is done
    {"op": "kill", "key": str, "signal": int}

Answer, once for every child: {"event": "exited", "key", "pid", "status", "time"}; the status is an exit status, or
minus a signal number. When the socket closes, every child is killed and the server leaves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, final

from framework.launch.child import run_child
from framework.launch.lifetime import die_with_parent
from framework.launch.signals import STOP_SIGNALS
from framework.launch.wire import Channel, Message


@final
class ForkServer:
    """Forks children as asked and reports their ends. `serve` returns when the parent has closed its end."""

    def __init__(self, channel: Channel, *, preload: list[str]) -> None:
        self._channel = channel
        self._preload = preload
        self._keys: dict[int, str] = {}  # pid → key, of children not yet reaped
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._heeded: dict[int, Any] = {}  # signals → their handlers in children

    def serve(self) -> None:
        # A handler must exist for the wake-up to be written; the work is done in the loop, never in the handler.
        signal.signal(signal.SIGCHLD, _ignore)
        # The parent decides for all, also where a scheduler signals every process of a job; it kills this one.
        self._heeded = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                self._serve_once()
        except (EOFError, OSError):
            self._kill_all()

    def _serve_once(self) -> None:
        if self._preload and not self._readable(timeout_s=0):
            self._preload_next()
            return
        ready = self._readable(timeout_s=None)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
            self._reap()
        if self._channel in ready:
            for message in self._channel.receive_ready():
                self._handle(message)

    def _readable(self, *, timeout_s: float | None) -> list[Any]:
        watched: list[Any] = [self._channel, self._wake_read]
        return select.select(watched, [], [], timeout_s)[0]

    def _preload_next(self) -> None:
        name = self._preload.pop(0)
        try:
            pkgutil.resolve_name(name)
        except Exception:
            # Whatever a module raises (a missing library is an OSError) is not an error yet: the child that needs it
            # imports it again and reports it as its own failure.
            self._preload.clear()

    def _handle(self, message: Message) -> None:
        if message["op"] == "spawn":
            self._spawn(message)
        elif message["op"] == "load":
            self._preload += message["names"]
            while self._preload:
                self._preload_next()
        elif message["op"] == "kill":
            for pid, key in self._keys.items():
                if key == message["key"]:
                    os.kill(pid, message["signal"])

    def _spawn(self, message: Message) -> None:
        fd = self._channel.take_fd() if message["takes_fd"] else None
        gc.collect()
        gc.freeze()  # keeps the collector from touching, and so copying, pages shared with the children
        server_pid = os.getpid()
        with warnings.catch_warnings():
            # BLAS libraries may hold idle threads; they re-create them after a fork through pthread_atfork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:  # too many processes, or no memory for one more
                print(f"A process can't be started: {error}", file=sys.stderr, flush=True)
                self._report(message["key"], pid=0, status=1)
                return
        if pid == 0:
            self._leave_in_child()
            run_child(message, fd=fd, parent_pid=server_pid)
        if fd is not None:
            os.close(fd)
        self._keys[pid] = message["key"]

    def _leave_in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._heeded.items():
            signal.signal(number, handler)
        for end in (self._channel, self._wake_read, self._wake_write):
            end.close()

    def _reap(self) -> None:
        for pid, status in _ended_children():
            self._report(self._keys.pop(pid), pid=pid, status=status)

    def _report(self, key: str, *, pid: int, status: int) -> None:
        self._channel.send({"event": "exited", "key": key, "pid": pid, "status": status, "time": time.time()})

    def _kill_all(self) -> None:
        for pid in self._keys:
            os.kill(pid, signal.SIGKILL)
        for pid in self._keys:
            os.waitpid(pid, 0)


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    return None


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def main(argv: list[str]) -> NoReturn:
    """Serve until the parent closes the socket; never returns."""
    fd, parent_pid, preload = int(argv[0]), int(argv[1]), argv[2:]
    die_with_parent(parent_pid)
    ForkServer(Channel(socket.socket(fileno=fd)), preload=preload).serve()
    os._exit(0)  # nothing to tear down, and unloading torch takes most of a second


if __name__ == "__main__":
    main(sys.argv[1:])
