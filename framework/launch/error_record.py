"""What a rank raised, as the record that the failure report is made of."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from framework.config.find_run import is_run
from framework.errors import DiskError, FrameworkError, LostRunDirError, RunError
from framework.monitoring.hooks import hook_of_traceback
from framework.system.files import free_bytes
from framework.system.run_dir import RunDir

# Modules of the innermost Python frame when torch's collectives and stores raise, in C++ too: a backward pass exchanges
# gradients, and ours wait for collectives.
_PEERS = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "framework.distributed", "framework.strategies")
# Gloo's messages, whatever called it.
_GLOO = re.compile(r"^\[[^\]\s]*\.cc:\d+\]|caused pair closure$")
# What torch says if the shared memory of data workers can't be made.
_TORCH_SHM = re.compile(r"/torch_.*: No space left on device")
_SHM = Path("/dev/shm")
# A file system with less is full: a page is the least that a file takes.
_FULL_BYTES = 65_536


def record_of(error: BaseException) -> dict[str, Any]:
    """Return the record of an exception, for `RankStatus.record_failure`.

    Of an exception that can't be described, because its class raises when it is asked for a text, a base class or a
    cause, the record has the class and the line that raised it.
    """
    try:
        return _record(error)
    except BaseException as fault:
        stand_in = RuntimeError(
            f"An exception of the class {type(error).__name__}, which can't be described: asked for what it is, it "
            f"raises {type(fault).__name__}."
        )
        # Not by the attribute, which the class may have replaced.
        frames = BaseException.__dict__["__traceback__"].__get__(error)
        return _record(stand_in.with_traceback(frames))


def _record(error: BaseException) -> dict[str, Any]:
    record: dict[str, Any] = {
        "time": time.time(),
        "exception": f"{type(error).__name__}: {text_of(error)}",
        "traceback": "".join(traceback.format_exception(error)),
        "hook": hook_of_traceback(error.__traceback__),
        "of_peers": of_peers(error),
        "expected": False,
        "exit_status": 1,
        "is_final": False,
    }
    if isinstance(error, FrameworkError):
        record["exception"] = text_of(error)
        record["expected"] = True
        record["exit_status"] = error.exit_status
        record["is_final"] = error.is_final
    return record


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or that the exception has no text because its `__str__` raises, be it SystemExit."""
    try:
        return str(error)
    except BaseException as fault:
        return f"(no text: its __str__ raises {type(fault).__name__})"


def of_peers(error: BaseException) -> str:
    """Return the messages of torch's collectives and stores in this error and its causes; empty if there are none.

    Only these mean that a peer was lost: the user's database may say "connection refused", too.
    """
    return "\n".join(text_of(link) for link in error_chain(error) if _is_of_peers(link))


def error_chain(error: BaseException) -> Iterator[BaseException]:
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
    if _GLOO.search(text_of(error)):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    module = f"{frames[-1].f_globals.get('__name__')}."
    return any(module.startswith(f"{package}.") for package in _PEERS)


# What happened to the files


def file_failure(error: BaseException, *, rank: int, run_dir: Path) -> RunError | None:
    """Return the error to report if files are the cause, whichever was used: a full disk, or no run directory.

    None if they aren't.
    """
    failure = _missing_run_dir(error, rank=rank, run_dir=run_dir) or _full_disk(error, rank=rank, run_dir=run_dir)
    if failure is not None:
        failure.__cause__ = error
    return failure


def _missing_run_dir(error: BaseException, *, rank: int, run_dir: Path) -> RunError | None:
    is_of_files = issubclass(type(error), (FileNotFoundError, DiskError))
    if not is_of_files or is_run(run_dir):
        return None
    return _lost(run_dir, rank=rank, reason=text_of(error))


def check_run_dir(run_dir: RunDir, *, rank: int) -> None:
    """Raise LostRunDirError if the run directory was deleted or moved since this rank was started. Takes 4 µs."""
    if not run_dir.config_file.is_file():
        raise _lost(run_dir.path, rank=rank, reason="it has no config.yaml any more")


def _lost(run_dir: Path, *, rank: int, reason: str) -> LostRunDirError:
    return LostRunDirError(
        f"The run directory {run_dir} was deleted or moved while rank {rank} was using it ({reason}).\n"
        "The run has ended, because nothing can be saved there, or resumed from there. If the directory was moved, "
        "move it back or resume the run from its new place: resume=NEW_PLACE. If it was deleted, start the run again: "
        "its checkpoints are gone."
    )


def _full_disk(error: BaseException, *, rank: int, run_dir: Path) -> RunError | None:
    is_full = issubclass(type(error), OSError) and getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and not _TORCH_SHM.search(text_of(error)):
        return None
    filename = getattr(error, "filename", None)
    file = filename or "its files"
    reason = getattr(error, "strerror", None) or text_of(error)
    place = _full_place(filename, run_dir=run_dir)
    first_line = f"Rank {rank} can't write {file}: {reason}."
    if place == _SHM:
        return RunError(
            f"{first_line}\n/dev/shm, the memory that data workers send batches through, is full. Lower "
            "data.num_workers or data.batch_size (data.num_workers=0 needs none), give the container more of it "
            "(docker run --shm-size=8g), or delete what others have left there. Then resume the run."
        )
    where = f"for {run_dir}" if place == run_dir else f"in {place}"
    return RunError(f"{first_line}\nExisting checkpoints are complete. Make room {where}, then resume the run.")


def _full_place(filename: Any, *, run_dir: Path) -> Path:
    """Return which folder has no room: that of the file, else the first that is full, else the run directory."""
    if isinstance(filename, (str, bytes)):
        folder = Path(os.fsdecode(filename)).absolute().parent
        if folder == _SHM or _SHM in folder.parents:
            return _SHM
        return run_dir if run_dir in (folder, *folder.parents) else folder
    for place in (run_dir, _SHM, Path(tempfile.gettempdir())):
        with suppress(OSError):
            free = free_bytes(place)
            if free is not None and free < _FULL_BYTES:
                return place
    return run_dir
