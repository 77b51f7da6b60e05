"""What every rank goes through: tell that it is here, call the entry, and leave a record of how that went."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from framework.errors import FrameworkError, RunError
from framework.launch.child import Tee
from framework.launch.heartbeat import beating
from framework.launch.link import Link, environment_board
from framework.launch.plan import RankArguments
from framework.pulse import Pulse

# Where the innermost Python frame is when torch's collectives and stores raise, in C++ too: a backward pass exchanges
# gradients, and what is ours waits for work that torch has begun.
_PEERS = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "framework.distributed", "framework.strategies")
_GLOO = re.compile(r"^\[[^\]\s]*\.cc:\d+\]|caused pair closure$")  # so it speaks, whoever has called it


def rank_main(arguments: Mapping[str, Any], fd: int | None) -> int:
    """Run one rank that the fork server made. `arguments`: entry, rank (RankArguments, plain); fd: of its pulse."""
    rank = RankArguments.from_plain(arguments["rank"])
    pulse = Pulse(fd)  # never closed: the stacks of one that doesn't leave can be asked for until it is gone
    pulse.be_seen()
    with beating(pulse):
        return run_entry(arguments["entry"], rank, Link(pulse, partial(environment_board, rank.attempt)))


@contextmanager
def watched(pulse: Pulse) -> Iterator[Pulse]:
    """While this is entered, the pulse beats and stacks can be asked for; it is closed afterwards."""
    try:
        pulse.be_seen()
        with beating(pulse):
            yield pulse
    finally:
        pulse.close()


def run_entry(entry: str, rank: RankArguments, link: Link) -> int:
    """Call `entry` ("module:function") as `entry(rank, link)`; gives the exit status for the process.

    Whatever comes out of the entry, SystemExit too, is this rank's failure. Without the record of having come to the
    end, written here, so is an end of the process with status 0.
    """
    module, _, name = entry.partition(":")
    pid = os.getpid()
    try:
        status = getattr(importlib.import_module(module), name)(rank, link)
    except BaseException as error:
        if os.getpid() != pid:  # a process that the user's code has forked: its end isn't the rank's
            raise
        told = _full_disk(error, rank) or error
        status = told.exit_status if isinstance(told, FrameworkError) else 1
        _record(told, link=link, status=status)
        return status
    if os.getpid() == pid:
        link.pulse.be_done(status or 0)
    return status or 0


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


def _record(error: BaseException, *, link: Link, status: int) -> None:
    """Say what happened: in this rank's log, and beside its pulse for the report.

    The terminal isn't written to: the parent shows the first failure, once.
    """
    expected = isinstance(error, FrameworkError)
    text = "".join(traceback.format_exception(error))
    stderr = sys.stderr.log if isinstance(sys.stderr, Tee) else sys.stderr
    with suppress(OSError, ValueError):  # of a full disk, say, which may be the very error; or letters not encodable
        stderr.write(text)
        stderr.flush()
    link.pulse.fail(
        {
            "time": time.time(),
            "exception": _message(error) if expected else f"{type(error).__name__}: {_message(error)}",
            "traceback": text,
            "of_peers": _of_peers(error),
            "expected": expected,
            "exit_status": status,
            "is_final": isinstance(error, FrameworkError) and error.is_final,
        }
    )


def _of_peers(error: BaseException) -> str:
    """What torch's collectives and stores have said in this error, or in one that it was made of; empty for nothing.

    Nobody else can have lost a rank: "connection refused" is also what a database of the user's says.
    """
    return "\n".join(_message(each) for each in _chain(error) if _is_of_peers(each))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that a traceback shows with it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_of_peers(error: BaseException) -> bool:
    if any(each.__module__.startswith("torch") and each.__name__ == "DistError" for each in type(error).__mro__):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return any(f"{module}.".startswith(f"{each}.") for each in _PEERS) or _GLOO.search(_message(error)) is not None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the user's own class: whatever its __str__ raises
        return f"(its message can't be shown: __str__ raised {type(second).__name__})"
