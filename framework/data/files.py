"""Files of a data set: used where they are, or downloaded once per node; always verified.

Nothing here knows a data set. Needs no torch, so that it can be imported wherever files are looked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from framework.errors import DataError

LOCK_NAME = ".lock"
PART_SUFFIX = ".part"

_CHUNK_BYTES = 1 << 18
_SILENCE_S = 30.0  # how long a server may say nothing
_SLOWEST_BYTES_PER_S = 1000  # on average over _SILENCE_S: a server that drips isn't waited for
_WAIT_S = 600.0  # how long the process that downloads may get nothing while others wait for it
_POLL_S = 0.1
_LINE_S = 2.0  # between two lines of progress

_log = logging.getLogger("framework")


@dataclass(frozen=True)
class Resource:
    """One file of a data set: its name, where it is downloaded and where it is kept; its MD5 in hexadecimal digits.

    unpacked: what it unpacks to, which is taken as well where it is found instead.
    """

    name: str
    md5: str
    size_bytes: int | None = None
    unpacked: Resource | None = None


def local_files(
    resources: Sequence[Resource],
    *,
    folder: Path,
    mirrors: Callable[[], Sequence[str]],
    also_in: Sequence[Path] = (),
    otherwise: str = "",
) -> list[Path]:
    """A verified file for each resource, itself or unpacked, in their order; what is missing is downloaded first.

    folder: looked in first, and where downloads go; nothing is written where no file is missing.
    also_in: further folders to look in.
    mirrors: called when a file is missing; gives addresses that a file's name is added to, tried in order.
    otherwise: a last line for the message where files can't be had.
    Any number of processes may call it at once: one of those that share the folder downloads, the others wait for it.
    Raises DataError for a file that is there but damaged, and for one that is missing and can't be downloaded.
    """
    places = [folder, *also_in]
    found = [_find(resource, places) for resource in resources]
    if None in found:
        # Whoever has forbidden it in this process (`sys.addaudithook`) raises here, before anything is written.
        sys.audit("framework.download", resources[found.index(None)].name, folder)
        with _held_lock(folder, otherwise=otherwise):
            # Another process may have downloaded while this one waited.
            found = [_find(resource, places) for resource in resources]
            missing = [resource for resource, path in zip(resources, found, strict=True) if path is None]
            if missing:
                _download_all(missing, folder=folder, mirrors=mirrors(), otherwise=otherwise)
    return [path or folder / resource.name for resource, path in zip(resources, found, strict=True)]


# Finding


def _find(resource: Resource, places: Sequence[Path]) -> Path | None:
    """The first good file; None where there is none at all. Raises DataError where all there are are bad."""
    bad: list[str] = []
    for place in places:
        for form in (resource, resource.unpacked):
            if form is None:
                continue
            path = place / form.name
            try:
                fault = fault_of(path, form)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if fault is None:
                for line in bad:
                    _log.warning("%s; %s is used instead", line, path)
                return path
            bad.append(f"{path} {fault}")
    if bad:
        advice = "Put a good file there, or delete this one: then it is downloaded again."
        raise DataError("\n".join([*(f"{line}." for line in bad), advice]))
    return None


def fault_of(path: Path, wanted: Resource) -> str | None:
    """What is wrong with a file, as the end of a sentence that begins with its name; None where it is as wanted.

    Raises FileNotFoundError or NotADirectoryError where there is none.
    """
    md5 = hashlib.md5(usedforsecurity=False)  # guards against accidents
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if wanted.size_bytes is not None and size != wanted.size_bytes:
                return f"is {'truncated' if size < wanted.size_bytes else 'another file'}: {_sizes(size, wanted)}"
            while chunk := file.read(_CHUNK_BYTES):
                md5.update(chunk)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        return f"can't be read: {error.strerror}"
    if md5.hexdigest() != wanted.md5:
        return f"is damaged: its MD5 is {md5.hexdigest()} instead of {wanted.md5}"
    return None


def _sizes(size: int, wanted: Resource) -> str:
    return f"it has {size:,} bytes instead of {wanted.size_bytes:,}"


# One process at a time


@contextmanager
def _held_lock(folder: Path, *, otherwise: str) -> Iterator[None]:
    """Hold the folder's lock. The kernel releases it when the holder dies; the file stays, since removing it races.

    Raises DataError where the folder can't be written to, also within the block.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK_NAME).open("a") as lock:
            _wait_for(lock, folder)
            yield
    except OSError as error:
        lines = [
            f"Files are missing in {folder} and can't be written there: {error.strerror or error}.",
            "Put them there, or set data.root to the folder that has them or to one that can be written to.",
            otherwise,
        ]
        raise DataError("\n".join(filter(None, lines))) from error


def _taken(lock: IO[str]) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(lock: IO[str], folder: Path) -> None:
    """Take the lock, and show how the holder's download grows meanwhile. Raises DataError where it stops growing."""
    received, deadline = -1, 0.0
    progress = _Progress(f"Another process downloads to {folder}", total=None)
    while not _taken(lock):
        now = _received(folder)
        if now != received:
            received, deadline = now, time.monotonic() + _WAIT_S
        elif time.monotonic() > deadline:
            raise DataError(
                f"Another process holds {folder / LOCK_NAME} and has downloaded nothing for {_WAIT_S:.0f} s.\n"
                f"End it (fuser {folder / LOCK_NAME} shows its number), or set data.root to another folder."
            )
        progress.show(received)
        time.sleep(_POLL_S)


def _received(folder: Path) -> int:
    """Bytes of the download that is under way."""
    total = 0
    for part in folder.glob(f"*{PART_SUFFIX}"):
        try:
            total += part.stat().st_size
        except FileNotFoundError:  # it was complete just now
            continue
    return total


# Downloading: only the holder of the lock


class _MirrorError(Exception):
    """A mirror doesn't give the file; the text says why."""


def _download_all(resources: Sequence[Resource], *, folder: Path, mirrors: Sequence[str], otherwise: str) -> None:
    """Put the files into the folder. Raises DataError at the first that no mirror gives."""
    for resource in resources:
        # A killed process leaves one; as the lock is held here, nobody is writing it.
        (folder / f"{resource.name}{PART_SUFFIX}").unlink(missing_ok=True)
    for number, resource in enumerate(resources):
        failures = _download(resource, folder=folder, mirrors=mirrors)
        if failures is not None:
            lines = _what_to_do(resources[number:], folder=folder, failures=failures)
            raise DataError("\n".join(filter(None, [*lines, otherwise])))


def _what_to_do(missing: Sequence[Resource], *, folder: Path, failures: Sequence[str]) -> list[str]:
    first, others = missing[0].name, len(missing) - 1
    names = first if others == 0 else f"{first} and {others} more"
    tried = f"tried {'; '.join(failures)}" if failures else "data.mirrors is empty"
    return [
        f"{names} can't be downloaded: {tried}.",
        f"Put the files, packed or unpacked, into {folder}, or set data.root to the folder that has them.",
        "Or set data.mirrors=[URL] to another place to download from; the file's name is added to it.",
    ]


def _download(resource: Resource, *, folder: Path, mirrors: Sequence[str]) -> list[str] | None:
    """Put one file into the folder, complete and verified. None; or why each mirror failed, and nothing is left."""
    part = folder / f"{resource.name}{PART_SUFFIX}"
    failures: list[str] = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{resource.name}"
        try:
            _receive(url, part, resource)
            fault = fault_of(part, resource)
            if fault is None:
                part.replace(folder / resource.name)
                return None
            failures.append(f"{url} (what came {fault})")
        except _MirrorError as error:
            failures.append(f"{url} ({error})")
        finally:
            part.unlink(missing_ok=True)
        _say(f"Failed: {failures[-1]}")
    return failures


def _receive(url: str, part: Path, resource: Resource) -> None:
    """Write what the server sends to `part`. Raises _MirrorError for the server, OSError for the disk."""
    with part.open("wb") as out, _connect(url) as answer:
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else resource.size_bytes
        progress = _Progress(f"Downloading {url}", total=total)
        received = 0
        progress.say(received)
        for chunk in _chunks(answer):
            out.write(chunk)
            received += len(chunk)
            progress.show(received)
        progress.say(received)
        out.flush()
        os.fsync(out.fileno())


def _connect(url: str) -> Any:
    # Some servers refuse Python's own name.
    with _mirror_errors():
        return urlopen(Request(url, headers={"User-Agent": "framework"}), timeout=_SILENCE_S)


def _chunks(answer: Any) -> Iterator[bytes]:
    """What comes, as it comes. Raises _MirrorError where nothing, or too little, comes."""
    received, before, checked_s = 0, 0, time.monotonic()
    while True:
        with _mirror_errors():
            chunk: bytes = answer.read1(_CHUNK_BYTES)
        if not chunk:
            return
        yield chunk
        received += len(chunk)
        waited_s = time.monotonic() - checked_s
        if waited_s >= _SILENCE_S:
            if received - before < _SLOWEST_BYTES_PER_S * waited_s:
                raise _MirrorError(f"too slow: {received:,} bytes so far")
            before, checked_s = received, time.monotonic()


@contextmanager
def _mirror_errors() -> Iterator[None]:
    try:
        yield
    except HTTPError as error:
        error.close()
        raise _MirrorError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)  # of URLError: what was raised below it
        raise _MirrorError(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__) from error


@final
class _Progress:
    """Plain lines, the same for terminals and logs: when it is told to, and every two seconds."""

    def __init__(self, what: str, *, total: int | None) -> None:
        self._what = what
        self._total = total
        self._next_s = time.monotonic() + _LINE_S

    def show(self, received: int) -> None:
        if time.monotonic() >= self._next_s:
            self.say(received)

    def say(self, received: int) -> None:
        amount = f"{received / 1e6:.1f} MB"
        if self._total:
            amount = f"{100 * received / self._total:.0f} %, {received / 1e6:.1f} of {self._total / 1e6:.1f} MB"
        _say(f"{self._what}: {amount}")
        self._next_s = time.monotonic() + _LINE_S


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
