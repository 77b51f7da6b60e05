"""What every rank started by a launcher goes through: call the entry, and leave a record of how that went."""

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
from framework.launch.keeper import done_key, failure_key
from framework.launch.plan import RankArguments
from framework.run_dir import RunDir

_STORE_TIMEOUT = timedelta(seconds=5)


def rank_main(arguments: Mapping[str, Any], _fd: int | None) -> int:
    """Run one rank. `arguments`: entry ("module:function"), rank (RankArguments as plain types).

    Whatever comes out of the entry, SystemExit too, is this rank's failure. Without the record of having come to the
    end, written here, so is an end of the process with status 0.
    """
    rank = RankArguments.from_plain(arguments["rank"])
    module, _, name = arguments["entry"].partition(":")
    pid = os.getpid()
    try:
        getattr(importlib.import_module(module), name)(rank)
    except BaseException as error:
        if os.getpid() != pid:  # a process that the user's code has forked: its end isn't the rank's
            raise
        told = _full_disk(error, rank) or error
        status = told.exit_status if isinstance(told, FrameworkError) else 1
        _record(rank, told, status=status)
        return status
    if os.getpid() == pid:
        _say(done_key(rank.rank), str(pid))
    return 0


def _full_disk(error: BaseException, rank: RankArguments) -> RunError | None:
    """What to tell of a disk without room, whichever file met it: logs, metrics, curves, predictions."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    told = RunError(
        f"Rank {rank.rank} can't write {error.filename or 'its files'}: {error.strerror}.\n"
        f"Checkpoints that are there are whole. Make room for {rank.run_dir}, then resume the run."
    )
    told.__cause__ = error
    return told


def _record(rank: RankArguments, error: BaseException, *, status: int) -> None:
    """Say what happened: in this rank's log, and in the keeper's store for the report.

    The terminal isn't written to: the parent shows the first failure, once.
    """
    expected = isinstance(error, FrameworkError)
    text = "".join(traceback.format_exception(error))
    stderr = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    with suppress(OSError, ValueError):  # of a full disk, say, which may be the very error; or letters not encodable
        stderr.write(text)
        stderr.flush()
    record = {
        "rank": rank.rank,
        "pid": os.getpid(),
        "time": time.time(),
        "exception": _message(error) if expected else f"{type(error).__name__}: {_message(error)}",
        "traceback": text,
        "expected": expected,
        "exit_status": status,
        "log": str(RunDir(Path(rank.run_dir)).rank_log(rank.rank)),
    }
    _say(failure_key(rank.rank), json.dumps(record))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the user's own class: whatever its __str__ raises
        return f"(its message can't be shown: __str__ raised {type(second).__name__})"


def _say(key: str, text: str) -> None:
    """Leave `text` in the keeper's store; there for certain on return."""
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=_STORE_TIMEOUT)
    store.set(key, text)
    store.check([key])  # `set` awaits no answer, and this process may be gone before the keeper has read it
