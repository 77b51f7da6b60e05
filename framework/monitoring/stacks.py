"""Python stacks of ranks and of their loader workers: how they are asked for, and what faulthandler writes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from framework.monitoring.hooks import Called, innermost_hook
from framework.monitoring.rank_status import CRASH, STACKS_SIGNAL, RankStatus

_TIMEOUT_S = 1.5
_WORKER_TIMEOUT_S = 0.3
_POLL_S = 0.02
# Of a rank.
_MAX_WORKERS_ASKED = 8

# Begins the stacks of a worker, after those of its rank.
_WORKER = "Data worker, pid "
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# In `flight_recorder.dump_before_abort`.
_ABORT_HANDLER = " in handle_abort"
# In the stack of a worker that isn't idle.
_LOADING = "torch/utils/data/_utils/fetch.py"


@dataclass(frozen=True)
class Asked:
    """A rank whose stacks are asked for."""

    status: RankStatus
    process: psutil.Process
    # By SIGSTOP or a debugger. It is continued, since it couldn't answer.
    is_stopped: bool


def ask_for_stacks(ranks: Mapping[int, Asked], *, own: RankStatus | None) -> dict[int, str]:
    """Return the Python stacks of these ranks, by rank.

    Args:
        own: the status of the rank in whose process this runs, if it is one of them.
    """
    sizes_before = {rank: asked.status.stacks_size() for rank, asked in ranks.items()}
    for asked in ranks.values():
        if own is not None and asked.process.pid == os.getpid():
            own.write_stacks()
            continue
        # The process may have just ended.
        with suppress(psutil.NoSuchProcess):
            _signal_main_thread(asked.process, STACKS_SIGNAL)
            if asked.is_stopped:
                # It handles the signal above first, so the stack is that of where it was stopped.
                asked.process.send_signal(signal.SIGCONT)

    # All have answered if each has written something, and none has written more since the last look.
    deadline = time.monotonic() + _TIMEOUT_S
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last_sizes = sizes
        sizes = {rank: asked.status.stacks_size() for rank, asked in ranks.items()}
        if sizes == last_sizes and all(sizes[rank] > sizes_before[rank] for rank in ranks):
            break

    # If a rank can't answer now, take what it wrote earlier.
    stacks = {}
    for rank, asked in ranks.items():
        stacks[rank] = asked.status.stacks(since=sizes_before[rank]) or asked.status.stacks()
    return stacks


def ask_workers_for_stacks(status: RankStatus, process: psutil.Process) -> dict[int, str]:
    """Return the stacks of a rank's loader workers, by pid. Being forked, they write them to the rank's memory."""
    stacks: dict[int, str] = {}
    with suppress(psutil.NoSuchProcess):
        workers = [child for child in process.children() if _handles(child.pid, STACKS_SIGNAL)]
        for worker in workers[:_MAX_WORKERS_ASKED]:
            size_before = status.stacks_size()
            _signal_main_thread(worker, STACKS_SIGNAL)
            _wait_until_written(status, size_before)
            stacks[worker.pid] = status.stacks(since=size_before)
    return stacks


def _wait_until_written(status: RankStatus, size_before: int) -> None:
    """Wait until there are more than `size_before` bytes of stacks, and no more are being written."""
    deadline = time.monotonic() + _WORKER_TIMEOUT_S
    size = size_before
    while time.monotonic() < deadline and (size == size_before or size != status.stacks_size()):
        size = status.stacks_size()
        time.sleep(_POLL_S)


def _handles(pid: int, number: int) -> bool:
    """Return True if the process has a handler for the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("SigCgt:"):
            # A hexadecimal mask, whose lowest bit is signal 1.
            caught_signals = int(line.split()[1], 16)
            return bool(caught_signals >> (number - 1) & 1)
    return False


def _signal_main_thread(process: psutil.Process, number: int) -> None:
    """Send a signal to the process's main thread. Of a stopped process, whichever thread runs first would take it.

    Raises psutil.NoSuchProcess if the process has ended.
    """
    libc = ctypes.CDLL(None)
    # glibc has tgkill since 2.30.
    if hasattr(libc, "tgkill") and process.is_running():
        libc.tgkill(process.pid, process.pid, number)
    else:
        process.send_signal(number)


# What faulthandler writes


def with_workers(stacks: str, of_workers: Mapping[int, str]) -> str:
    """Return a rank's stacks with those of its loader workers, by pid."""
    workers = [f"{_WORKER}{pid}:\n{text}" for pid, text in of_workers.items()]
    return "\n\n".join([stacks, *workers])


def main_stack(stacks: str) -> Iterator[str]:
    """Yield the frames of the thread that crashed, else of the main thread, innermost first.

    If a loader worker is loading something, they are the worker's: the rank waits for it.
    """
    stacks, *stacks_of_workers = stacks.split(_WORKER)
    for text in stacks_of_workers:
        if _LOADING in text:
            stacks = text
            break
    # The main thread, the oldest, comes last. It begins with "Thread 0x", or with "Current thread 0x" if it was the one
    # that handled the signal.
    _, _, thread = stacks.rpartition("hread 0x")
    if stacks.startswith(CRASH):
        _, _, crashed = stacks.rpartition("Current thread ")
        # A thread of gloo's that aborts the process has no frames but that one of ours.
        if _ABORT_HANDLER not in crashed.partition("\n\n")[0]:
            thread = crashed
    for line in thread.splitlines()[1:]:
        if not line.startswith("  File "):
            return
        yield line.strip()


def near(path: str) -> str:
    """Return the path relative to the working directory if it is below it, or to site-packages."""
    return path.removeprefix(f"{Path.cwd()}/").rpartition("/site-packages/")[2]


def shown_frame(line: str) -> str:
    """Return `function at file:line` for a line of faulthandler's."""
    frame = _FRAME.fullmatch(line)
    if frame is None:
        return line
    return f"{frame['name']} at {near(frame['file'])}:{frame['line']}"


def hook_in(stacks: str | None) -> str | None:
    """Return the hook of a callback, logger or task that the thread of `main_stack` is in, and where; None without one.

    A stack doesn't say of which class it is.
    """
    if stacks is None:
        return None
    frames = [frame for frame in map(_FRAME.fullmatch, main_stack(stacks)) if frame is not None]
    position = innermost_hook([Called(frame["name"], frame["file"]) for frame in frames])
    return None if position is None else shown_frame(frames[position].string)
