"""What runs in a rank's process: register its status, call the entry, record how that ended."""

from __future__ import annotations

import os
import pkgutil
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from framework.distributed.store import host_store, open_run_store
from framework.errors import EXIT_STOPPED
from framework.launch.child import Tee
from framework.launch.error_record import file_failure, of_peers, record_of
from framework.launch.plan import MonitorLink, RankArguments
from framework.launch.stopping import passing_on_signals
from framework.monitoring.rank_status import RankStatus, heartbeat

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
    with heartbeat(rank_status), passing_on_signals(rank_status):
        link = MonitorLink(rank_status, partial(open_run_store, rank.attempt))
        return run_entry(arguments["entry"], rank, link, listener_fd=listener_fd)


def run_entry(entry: str, rank: RankArguments, link: MonitorLink, *, listener_fd: int | None = None) -> int:
    """Call `entry` ("module:function") as `entry(rank, link)`; return the exit status of the process.

    Whatever the entry raises, SystemExit too, is this rank's failure. The rank is marked as done only here, so leaving
    early with status 0 is a failure, too.
    """
    pid = os.getpid()
    rank_status = link.rank_status

    def record_failure(error: BaseException, *, memory: Mapping[str, Any] | None = None) -> None:
        if os.getpid() != pid:
            _leave_copy(error)
        if rank_status.failure() is None and not is_consequence_of_stop(error):
            failure = file_failure(error, rank=rank.rank, run_dir=Path(rank.run_dir))
            _record(failure or error, rank_status, memory=memory)
            if of_peers(error):
                # The monitor can't ask for it once this process has ended.
                rank_status.dump_collectives()

    def is_consequence_of_stop(error: BaseException) -> bool:
        """Return True if a peer has ended on request before training: ranks don't agree on a step there."""
        page = rank_status.read()
        return bool(page.stop_signal) and not page.is_stoppable and bool(of_peers(error))

    try:
        if listener_fd is not None:
            _HOSTED.append(host_store(socket.socket(fileno=listener_fd)))
        status = pkgutil.resolve_name(entry)(rank, replace(link, record_failure=record_failure))
    except BaseException as error:
        # This does nothing if the entry has recorded it already, before it closed what it had opened.
        record_failure(error)
        record = rank_status.failure()
        if record is None:
            rank_status.mark_done()
            return EXIT_STOPPED
        rank_status.mark_closed()
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


def _record(error: BaseException, rank_status: RankStatus, *, memory: Mapping[str, Any] | None) -> None:
    """Write what happened to this rank's log, and beside its status for the report.

    The parent shows the first failure on the terminal, once.
    """
    record = record_of(error)
    stderr = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    stderr.write(record["traceback"])
    stderr.flush()
    rank_status.record_failure({**record, "memory": memory})
