"""Who may write to a run in a bucket, which can't lock. No torch.

Each command that trains a run claims it: it creates RUN/.claims/00000001, the next one 00000002, and so on. A bucket
creates an object at most once, so of two machines that resume a run at once, one is refused. A command that was
interrupted leaves its claim, and the next one takes over: whoever has the newest claim writes. A command that finds a
newer one stops uploading.

On this machine, RUN/.remote.json says which copy of the run this is, and up to which claim it has all that was done.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.errors import RequestError
from framework.system.files import parse_json
from framework.system.run_dir import read_object, write_object

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CLAIMS = ".claims"
LOCAL_RECORD = ".remote.json"
# fsspec's protocols of stores that have objects, and no folders.
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "cos", "tos", "b2", "r2"})


class ClaimedError(RequestError):
    """Another machine has the run."""


@final
@dataclass(frozen=True)
class Claim:
    """One command's claim of a run."""

    number: int
    # The directory that is trained in: `LocalRecord.copy`.
    copy: str
    host: str
    pid: int
    time: str
    # Tells this claim from any other.
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    @staticmethod
    def of_this_process(number: int, *, copy: str) -> Claim:
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return Claim(number, copy=copy, host=socket.gethostname(), pid=os.getpid(), time=time)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (at {self.time})"


@final
@dataclass(frozen=True)
class LocalRecord:
    """What this machine knows of a run's URL."""

    # Names this directory among the copies of the run on other machines.
    copy: str = field(default_factory=lambda: secrets.token_hex(8))
    # This directory has what was trained up to this claim; None if that isn't known.
    claim: int | None = None
    # Path in the run → what `upload.Stamp` says of the file that was uploaded.
    files: Mapping[str, list[int]] = field(default_factory=dict)
    # The number of the directory in its file system: a copy of it has another one.
    inode: int = 0

    @staticmethod
    def read(run_dir: Path) -> LocalRecord:
        """Return the record; a new one if there is none, it is damaged, or it was copied with the directory."""
        inode = run_dir.stat().st_ino
        content = read_object(run_dir / LOCAL_RECORD)
        try:
            record = LocalRecord(**(content or {"inode": inode}))
        except TypeError:
            record = LocalRecord(inode=inode)
        if record.inode != inode:
            return LocalRecord(claim=record.claim, inode=inode)
        return record

    def write(self, run_dir: Path) -> None:
        write_object(run_dir / LOCAL_RECORD, asdict(self))


def newest_claim(filesystem: AbstractFileSystem, run: str) -> Claim | None:
    """Return the newest claim of the run at this path; None if it was never claimed."""
    folder = f"{run}/{CLAIMS}"
    filesystem.invalidate_cache()
    try:
        names = [Path(name).name for name in filesystem.ls(folder, detail=False)]
    except FileNotFoundError:
        return None
    numbers = [int(name) for name in names if name.isdecimal()]
    if not numbers:
        return None
    return _read(filesystem, run, max(numbers))


def note_claim(run_dir: Path, number: int) -> None:
    """Note that a directory now has what was trained up to this claim: it was fetched."""
    replace(LocalRecord.read(run_dir), claim=number, files={}).write(run_dir)


def claim_run(filesystem: AbstractFileSystem, run: str, record: LocalRecord, *, url: str) -> Claim:
    """Claim the run at this path for one directory.

    Raises ClaimedError if another machine has claimed it since that directory was made or fetched, or does so at this
    moment. Other errors are the file system's.
    """
    newest = newest_claim(filesystem, run)
    number = 1
    if newest is not None:
        number = newest.number + 1
        is_known = record.claim is None or newest.number <= record.claim
        if newest.copy != record.copy and not is_known:
            raise _claimed(newest, url=url)
    claim = Claim.of_this_process(number, copy=record.copy)
    content = json.dumps(asdict(claim), indent=2) + "\n"
    path = _path(run, number)
    make_parents(filesystem, path)
    try:
        filesystem.pipe_file(path, content.encode(), mode="create")
    except FileExistsError:
        other = _read(filesystem, run, number)
        # The answer to a first try may have been lost.
        if other.key != claim.key:
            raise _claimed(other, url=url) from None
    return claim


def make_parents(filesystem: AbstractFileSystem, path: str) -> None:
    """Make the folders of a path, except in a bucket: there they are nothing, and a missing bucket would be made."""
    protocols = filesystem.protocol
    if isinstance(protocols, str):
        protocols = (protocols,)
    if not _BUCKETS.intersection(protocols):
        filesystem.makedirs(filesystem._parent(path), exist_ok=True)


def _read(filesystem: AbstractFileSystem, run: str, number: int) -> Claim:
    """Return a claim. Raises RequestError if it is damaged."""
    path = _path(run, number)
    try:
        content: Any = parse_json(filesystem.cat_file(path))
        return Claim(**content)
    except (ValueError, TypeError) as error:
        raise RequestError(f"The claim {path} is damaged: {error}. Remove it.") from error


def _claimed(claim: Claim, *, url: str) -> ClaimedError:
    return ClaimedError(
        f"The run {url} was resumed by {claim}.\n"
        "Two machines can't train one run: end that command first, then resume the run again, from what it saved."
    )


def _path(run: str, number: int) -> str:
    return f"{run}/{CLAIMS}/{number:08d}"
