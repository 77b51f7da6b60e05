"""A child of the fork server: its environment and its exit; and where any process of a run prints: log, terminal."""

from __future__ import annotations

import atexit
import faulthandler
import io
import logging
import os
import pkgutil
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO, final

from framework.system.hardware import set_own_cores
from framework.system.orphans import ENDS_WITH_OTHERS
from framework.system.output import ERASE_LINE, tolerant
from framework.system.signals import die_with_parent

Message = dict[str, Any]
# How long a process may take to exit after its work.
LEAVE_S = 10.0


@dataclass(frozen=True)
class Child:
    """A process to fork: `entry` ("module:function") is called as `function(arguments, *fds)`."""

    entry: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    # The cores that it may use; None: those of the process that asks for it.
    cores: frozenset[int] | None = None
    # The file for its output; None keeps the parent's streams.
    log: Path | None = None
    # If its output goes to the terminal as well.
    terminal: bool = False
    # The name by which the server and the command know it.
    key: str = field(default_factory=lambda: secrets.token_hex(8))


def run_child(message: Message, *, fds: Sequence[int], parent_pid: int) -> NoReturn:
    """Take over the environment that the message describes, call the child's entry, exit with its result."""
    status = 1
    child: Child = message["child"]
    try:
        die_with_parent(parent_pid)
        _enter_environment(message)
        if child.log is not None:
            log_to(child.log, terminal=child.terminal)
        status = pkgutil.resolve_name(child.entry)(child.arguments, *fds)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """End this process: join its threads, run its exit functions, flush. Unloading torch would take about a second."""
    threading.Thread(target=_end_anyway, args=(status,), daemon=True).start()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _end_anyway(status: int) -> None:
    """End this process if one of the user's threads or exit functions keeps it from exiting."""
    time.sleep(LEAVE_S)
    log = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    print(f"This process doesn't leave after its work: ended after {LEAVE_S:g} s", file=log, flush=True)
    # The disk may be full, or the user's code has closed the stream.
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(log)
    os._exit(status)


def _enter_environment(message: Message) -> None:
    os.environ.clear()
    os.environ.update(message["environment"])
    set_own_cores(message["cores"])
    os.chdir(message["cwd"])
    sys.path[:] = message["sys_path"]
    sys.argv[:] = message["argv"]
    stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)


def log_to(path: Path, *, terminal: bool) -> None:
    """Send what this process prints to its log file; with `terminal`, Python's streams and descriptor 2 to both.

    Without a terminal, file descriptors are redirected, so the log has what compiled code prints. A full disk raises
    nothing.
    """
    log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    faulthandler.enable(log)
    if terminal:
        status = StatusLine()
        sys.stdout = Tee(tolerant(sys.stdout), tolerant(log), status=status)
        sys.stderr = Tee(tolerant(_copy_descriptor_2(path)), tolerant(log), status=status)
        return
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = tolerant(_stream_to_log(1))
    sys.stderr = tolerant(_stream_to_log(2))


def _stream_to_log(descriptor: int) -> TextIO:
    """Return a stream that writes each line to the log at once."""
    file: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        file,
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


def show_status(text: str) -> None:
    """Show on the terminal what this process does, until it prints something else. Not in logs, pipes and notebooks."""
    out = sys.stdout
    moves_cursor = os.environ.get("TERM") not in (None, "", "dumb") and "JPY_PARENT_PID" not in os.environ
    if isinstance(out, Tee) and out.isatty() and moves_cursor:
        out.show_status(text)


def _copy_descriptor_2(path: Path) -> TextIO:
    """Send what compiled code writes to descriptor 2 to the log, too; return a stream that writes to the terminal only.

    A process of its own (`tee`) copies, since this one may be aborted right after it has written why. It ends when no
    process holds the descriptor any more, and ignores the signals that stop a run.
    """
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    reading_end, writing_end = os.pipe()
    command = ["sh", "-c", 'trap "" HUP INT TERM USR1 USR2; exec tee -a "$0"', str(path)]
    streams = [(os.POSIX_SPAWN_DUP2, reading_end, 0), (os.POSIX_SPAWN_DUP2, terminal.fileno(), 1)]
    # In a container without a shell, the log lacks what compiled code prints.
    with suppress(OSError):
        os.posix_spawn("/bin/sh", command, {**os.environ, ENDS_WITH_OTHERS: "1"}, file_actions=streams)
        os.dup2(writing_end, 2)
    os.close(reading_end)
    os.close(writing_end)
    return terminal


def silence_compiled_code() -> None:
    """Discard what is written to file descriptors 1 and 2 from now on, but not Python's streams.

    For processes that use the run's store and report its loss themselves, without torch's pages of C++ frames.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        setattr(sys, name, tolerant(os.fdopen(os.dup(number), "w", buffering=1, errors="backslashreplace")))
        os.dup2(null, number)
    os.close(null)


@dataclass
class StatusLine:
    """What a terminal shows below the output."""

    # If there is a line that the next output replaces.
    is_shown: bool = False


@final
class Tee(io.TextIOBase):
    """A text stream that writes to the terminal and to a log, and otherwise behaves as the terminal.

    Both are tolerant streams. If the disk is full, the log keeps a few kB until there is room.

    Args:
        status: The status line of the terminal, which standard output and standard error share.
    """

    def __init__(self, terminal: Any, log: Any, *, status: StatusLine | None = None) -> None:
        self.terminal = terminal
        self.log = log
        self._status = status or StatusLine()

    def write(self, text: str) -> int:
        self.log.write(text)
        if self._status.is_shown:
            self._status.is_shown = False
            self.terminal.write(f"\r{ERASE_LINE}")
        self.terminal.write(text)
        return len(text)

    def show_status(self, text: str) -> None:
        """Show a line on the terminal only, which the next output replaces."""
        self.terminal.write(f"\r{ERASE_LINE}{text}\r")
        self.terminal.flush()
        self._status.is_shown = True

    def flush(self) -> None:
        self.log.flush()
        self.terminal.flush()

    def isatty(self) -> bool:
        return bool(self.terminal.isatty())

    def fileno(self) -> int:
        return int(self.terminal.fileno())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # settable in the base class
        return str(self.terminal.encoding)
