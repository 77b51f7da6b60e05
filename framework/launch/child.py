"""What a freshly forked child does before and after the function it was made for."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import io
import logging
import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, final

from framework.launch.lifetime import die_with_parent
from framework.launch.wire import Message


def run_child(message: Message, *, fd: int | None, parent_pid: int) -> NoReturn:
    """Take over the environment the message describes, call its entry, leave with the status it gives.

    The entry is called as `entry(arguments, fd)` and gives an exit status. Never returns.
    """
    status = 1
    try:
        die_with_parent(parent_pid)
        _enter_environment(message)
        module, _, name = message["entry"].partition(":")
        status = getattr(importlib.import_module(module), name)(message["arguments"], fd)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """End this process fast: join its threads, run its exit functions, flush, and skip unloading every module.

    Tearing the interpreter down with torch loaded costs about a second for nothing: the kernel frees the memory.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _enter_environment(message: Message) -> None:
    for name in message["unset"]:
        os.environ.pop(name, None)
    os.environ.update(message["environment"])
    os.chdir(message["cwd"])
    sys.path[:] = message["sys_path"]
    sys.argv[:] = message["argv"]
    stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    if message["log"] is not None:
        log_to(Path(message["log"]), terminal=message["terminal"])


def log_to(path: Path, *, terminal: bool) -> None:
    """Send what this process prints to its log file; with `terminal`, Python's own streams to both.

    File descriptors are redirected too where there is no terminal, so that what C++ code prints is kept as well. What a
    full disk doesn't take ends nothing.
    """
    log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    faulthandler.enable(log)
    if terminal:
        sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
        return
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = io.TextIOWrapper(_Log(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(_Log(2, "w", closefd=False), line_buffering=True, write_through=True)


@final
class _Log(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


@final
class Tee(io.TextIOBase):
    """A text stream that writes to the terminal and to a log; what it says of itself is true of the terminal.

    A terminal that is gone, or a pipe that nobody reads any more, ends nothing: the log has all of it. Nor does a disk
    that takes no more: the log keeps a few kB of it until there is room.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self.terminal = terminal
        self.log = log

    def write(self, text: str) -> int:
        self.write_log(text)
        with suppress(OSError):
            self.terminal.write(text)
        return len(text)

    def write_log(self, text: str) -> None:
        """Past the terminal."""
        with suppress(OSError):
            self.log.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.log.flush()
        with suppress(OSError):
            self.terminal.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # settable in the base class, for nobody
        return self.terminal.encoding
