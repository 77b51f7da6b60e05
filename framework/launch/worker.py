"""What runs in a rank's process: register its status, call the entry, record how that ended."""

from __future__ import annotations

import errno
import os
import pkgutil
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from framework.distributed.store import host_store, open_run_store
from framework.errors import FrameworkError, RunError
from framework.launch.child import Tee
from framework.launch.plan import MonitorLink, RankArguments
from framework.monitoring.rank_status import RankStatus, heartbeat

# Modules of the innermost Python frame when torch's collectives and stores raise, in C++ too: a backward pass exchanges
# gradients, and ours wait for collectives.
_PEERS = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "framework.distributed", "framework.strategies")
# Gloo's messages, whatever called it.
_GLOO = re.compile(r"^\[[^\]\s]*\.cc:\d+\]|caused pair closure$")
# Stores, kept to the end of the process: groups with threads may outlive the entry.
_HOSTED: list[object] = []


def rank_main(arguments: Mapping[str, Any], status_fd: int, listener_fd: int | None = None) -> int:
    """Run one rank in a child of the fork server.

    Args:
        arguments: `entry` and `rank`, a RankArguments.
        status_fd: The file descriptor of the memory for the rank status.
        listener_fd: A listening socket on which this rank hosts the store.
    """
    rank: RankArguments = arguments["rank"]
    # Never closed: stacks can be asked for until the process ends.
    rank_status = RankStatus(status_fd)
    with heartbeat(rank_status):
        link = MonitorLink(rank_status, partial(open_run_store, rank.attempt))
        return run_entry(arguments["entry"], rank, link, listener_fd=listener_fd)


def run_entry(entry: str, rank: RankArguments, link: MonitorLink, *, listener_fd: int | None = None) -> int:
    """Call `entry` ("module:function") as `entry(rank, link)`; return the exit status of the process.

    Whatever the entry raises, SystemExit too, is this rank's failure. The rank is marked as done only here, so leaving
    early with status 0 is a failure, too.
    """
    pid = os.getpid()
    rank_status = link.rank_status

    def record_failure(error: BaseException) -> None:
        if os.getpid() != pid:
            _leave_copy(error)
        if rank_status.failure() is None:
            _record(_full_disk(error, rank) or error, rank_status)

    try:
        if listener_fd is not None:
            _HOSTED.append(host_store(socket.socket(fileno=listener_fd)))
        status = pkgutil.resolve_name(entry)(rank, replace(link, record_failure=record_failure))
    except BaseException as error:
        # This does nothing if the entry has recorded it already, before it closed what it had opened.
        record_failure(error)
        rank_status.mark_closed()
        record = rank_status.failure()
        assert record is not None
        return int(record["exit_status"])
    rank_status.mark_done()
    return status or 0


def _leave_copy(error: BaseException) -> NoReturn:
    """End a copy of the rank, forked by the user's code, that raised an error: only the rank may close resources."""
    status = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _full_disk(error: BaseException, rank: RankArguments) -> RunError | None:
    """Return the error to report if the disk is full, whichever file was being written."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    failure = RunError(
        f"Rank {rank.rank} can't write {error.filename or 'its files'}: {error.strerror}.\n"
        f"Existing checkpoints are complete. Make room for {rank.run_dir}, then resume the run."
    )
    failure.__cause__ = error
    return failure


def _record(error: BaseException, rank_status: RankStatus) -> None:
    """Write what happened to this rank's log, and beside its status for the report.

    The parent shows the first failure on the terminal, once.
    """
    text = "".join(traceback.format_exception(error))
    stderr = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    stderr.write(text)
    stderr.flush()

    record = {
        "time": time.time(),
        "exception": f"{type(error).__name__}: {error}",
        "traceback": text,
        "of_peers": _of_peers(error),
        "expected": False,
        "exit_status": 1,
        "is_final": False,
    }
    if isinstance(error, FrameworkError):
        record["exception"] = str(error)
        record["expected"] = True
        record["exit_status"] = error.exit_status
        record["is_final"] = error.is_final
    rank_status.record_failure(record)


def _of_peers(error: BaseException) -> str:
    """Return the messages of torch's collectives and stores in this error and its causes; empty if there are none.

    Only these mean that a peer was lost: the user's database may say "connection refused", too.
    """
    return "\n".join(str(link) for link in _chain(error) if _is_of_peers(link))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that a traceback shows with it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        if following.__cause__ is not None or following.__suppress_context__:
            following = following.__cause__
        else:
            following = following.__context__


def _is_of_peers(error: BaseException) -> bool:
    for base in type(error).__mro__:
        if base.__name__ == "DistError" and base.__module__.startswith("torch"):
            return True
    if _GLOO.search(str(error)):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    module = f"{frames[-1].f_globals.get('__name__')}."
    return any(module.startswith(f"{package}.") for package in _PEERS)
