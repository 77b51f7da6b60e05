"""What every rank started by a launcher goes through: call the entry; if it raises, leave a record before leaving."""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from framework.errors import FrameworkError, RunError
from framework.launch.child import Tee
from framework.launch.keeper import failure_key
from framework.launch.plan import RankArguments
from framework.run_dir import RunDir

_STORE_TIMEOUT = timedelta(seconds=5)


def rank_main(arguments: Mapping[str, Any], _fd: int | None) -> int:
    """Run one rank. `arguments`: entry ("module:function"), rank (RankArguments as plain types)."""
    rank = RankArguments.from_plain(arguments["rank"])
    module, _, name = arguments["entry"].partition(":")
    try:
        getattr(importlib.import_module(module), name)(rank)
    except Exception as error:
        told = _full_disk(error, rank) or error
        status = told.exit_status if isinstance(told, FrameworkError) else 1
        _record(rank, told, status=status)
        return status
    return 0


def _full_disk(error: Exception, rank: RankArguments) -> RunError | None:
    """What to tell of a disk without room, whichever file met it: logs, metrics, curves, predictions."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    told = RunError(
        f"Rank {rank.rank} can't write {error.filename or 'its files'}: {error.strerror}.\n"
        f"Checkpoints that are there are whole. Make room for {rank.run_dir}, then resume the run."
    )
    told.__cause__ = error
    return told


def _record(rank: RankArguments, error: Exception, *, status: int) -> None:
    """Say what happened: in this rank's log, and in the keeper's store for the report.

    The terminal isn't written to: the parent shows the first failure, once.
    """
    expected = isinstance(error, FrameworkError)
    text = "".join(traceback.format_exception(error))
    stderr = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    with suppress(OSError):  # of a full disk, say, which may be the very error
        stderr.write(text)
        stderr.flush()
    record = {
        "rank": rank.rank,
        "pid": os.getpid(),
        "time": time.time(),
        "exception": str(error) if expected else f"{type(error).__name__}: {error}",
        "traceback": text,
        "expected": expected,
        "exit_status": status,
        "log": str(RunDir(Path(rank.run_dir)).rank_log(rank.rank)),
    }
    _connect().set(failure_key(rank.rank), json.dumps(record))


def _connect() -> Any:
    from torch.distributed import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_STORE_TIMEOUT)
