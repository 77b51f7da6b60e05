"""Which worker runs which trial: one claim each, taken by one of several processes and machines. No torch here.

A claim is a file `KEY.GENERATION`, such as `7.1`; the newest generation counts. Taking a claim creates the next one
with O_EXCL, which is atomic on local disks and on NFS from version 3 on, and needs no hard links, which some file
systems don't have. So two workers that see the same claim dead can't both take it over, and nothing that may be
somebody else's is ever renamed or removed, as it would be if there were one file with one name.

A worker touches its claims every few seconds. A claim is free if it was released, if its worker has ended on this
machine, or if nobody has touched it for a minute by the clock of the file system: those of machines differ.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from framework.errors import DiskError, RunError
from framework.system.files import open_regular, parse_json

HEARTBEAT_LOST_S = 60.0
"""A claim that its worker hasn't touched for this long can be taken over."""

# A claim must be seen untouched again after this share of that time. After a pause that stopped all workers, of the
# disk's server or of this machine, each of them touches its claims in it.
_SEEN_AGAIN = 1 / 6
# The share of that time for a claim that is still empty. A claim is created, then written, so its worker was killed in
# between, or is suspended: it sees that it was too slow when it goes on.
_EMPTY = 1 / 30
# The share of that time after which the clock of the file system is read again, which creates a file.
_CLOCK_READ = 1 / 12
# The time of the last change of a claim that was released.
_RELEASED_NS = 0
# Generations that stay, older ones are removed. While one is being created or looked up, no more than a few can follow.
_KEPT = 8
# Of the content of a claim.
_MAX_BYTES = 4096
# Linux has none above.
_MAX_PID = 2**22
_POLL_S = 0.01

Key = int | str
"""What is claimed: the number of a trial, or the name of something else that only one process may do."""


@final
@dataclass(frozen=True)
class Claim:
    """The right to run a trial, or to do something else, until it is released or lost."""

    key: Key
    generation: int
    # Describes the worker from which it was taken over; None if the claim was free.
    taken_from: str | None = None


@final
class Claims:
    """The claims of one worker in a folder. `beat` must be called every few seconds while it has any."""

    def __init__(self, folder: Path, owner: str, *, lost_s: float = HEARTBEAT_LOST_S) -> None:
        """Create the folder, if it isn't there. Raises DiskError if that fails.

        Args:
            owner: describes the worker, for messages.
            lost_s: after this time without a heartbeat, a claim can be taken over; the same for all workers.
        """
        self._folder = folder
        self._lost_s = lost_s
        pid = os.getpid()
        facts = {
            "worker": owner,
            "host": socket.gethostname(),
            "pid": pid,
            "started": _start_of(pid),
            "processes": _process_space(),
        }
        self._content = json.dumps(facts).encode()
        self._held: dict[Key, Claim] = {}
        # When a claim was first seen untouched for too long, by its file and the time of its last heartbeat.
        self._silent_since_s: dict[tuple[Path, int], float] = {}
        self._is_beating = True
        # The clock of the file system minus the clock of this process, and when they were compared.
        self._disk_offset_s = 0.0
        self._compared_s = -math.inf
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"{folder} can't be created: {error.strerror or error}.") from error

    def take(self, key: Key) -> Claim | None:
        """Take a claim that is free; return None if it isn't. Raises DiskError if the disk refuses.

        Afterwards, look whether the trial has ended: who had the claim may have run it to its end.
        """
        try:
            return self._take(key)
        except OSError as error:
            raise DiskError(f"{self._folder} can't be used: {error.strerror or error}.") from error

    def release(self, key: Key) -> None:
        """Let others take the claim, at once. It may be lost already."""
        path = self._path(self._held.pop(key))
        # If it fails, others have had it since, or get it once its heartbeat ends.
        with suppress(OSError):
            os.utime(path, ns=(_RELEASED_NS, _RELEASED_NS), follow_symlinks=False)

    def beat(self) -> str | None:
        """Touch the claims. Return what is wrong if that fails for the first time since it worked.

        A disk that is full or away isn't fatal: if others take a claim over meanwhile, `is_lost` says so.
        """
        failure = None
        for claim in self._held.values():
            try:
                os.utime(self._path(claim), follow_symlinks=False)
            except FileNotFoundError:
                # Others have had it since, unless the disk is away.
                if not os.path.isdir(self._folder):  # noqa: PTH112  # it raises nothing
                    failure = f"{self._folder} isn't there"
            except OSError as error:
                failure = f"{self._folder} can't be written: {error.strerror or error}"
        is_new = failure is not None and self._is_beating
        self._is_beating = failure is None
        if not is_new:
            return None
        return f"{failure}. After {self._lost_s:.0f} s, other workers may take over what runs here."

    def is_lost(self, key: Key) -> bool:
        """Return True if another worker has taken over a claim of this one, which must then stop that trial."""
        claim = self._held[key]
        successor = Claim(key, claim.generation + 1)
        if os.path.lexists(self._path(successor)):
            return True
        # Both are removed once many others have had it. Without the folder, nothing is known.
        return not os.path.lexists(self._path(claim)) and os.path.isdir(self._folder)  # noqa: PTH112

    def _take(self, key: Key) -> Claim | None:
        newest = Claim(key, self._newest_generation(key))
        taken_from = None
        if newest.generation > 0:
            holder = _read_holder(self._path(newest))
            if holder is None or not self._is_free(self._path(newest), holder):
                return None
            if holder.touched_ns != _RELEASED_NS:
                taken_from = holder.description

        claim = Claim(key, newest.generation + 1, taken_from)
        path = self._path(claim)
        if not self._create(path):
            return None
        # If this process was suspended after its look, old generations may have been removed, and this one isn't the
        # newest. If it was suspended before it had written the claim, another worker may have taken that over.
        if self._newest_generation(key) > claim.generation:
            path.unlink(missing_ok=True)
            return None
        outdated = Claim(key, claim.generation - _KEPT)
        self._path(outdated).unlink(missing_ok=True)
        self._held[key] = claim
        return claim

    def _path(self, claim: Claim) -> Path:
        return self._folder / f"{claim.key}.{claim.generation}"

    def _newest_generation(self, key: Key) -> int:
        """Return the newest generation of a claim, or one that was the newest at this moment; 0 if there is none."""
        newest = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                start, _, generation = entry.name.rpartition(".")
                if start == str(key) and generation.isdecimal():
                    newest = max(newest, int(generation))
        return newest

    def _create(self, path: Path) -> bool:
        """Create a claim; return False if another process was faster."""
        try:
            file = path.open("xb")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    def _is_free(self, path: Path, holder: _Holder) -> bool:
        if holder.touched_ns == _RELEASED_NS or holder.has_ended():
            return True
        # Also if it is in the future: a clock was set back.
        silence_s = abs(self._disk_time_s() - holder.touched_ns / 1e9)
        limit_s = self._lost_s
        if holder.is_empty:
            limit_s *= _EMPTY
        if silence_s < limit_s:
            return False
        now_s = time.monotonic()
        since_s = self._silent_since_s.setdefault((path, holder.touched_ns), now_s)
        return now_s - since_s >= limit_s * _SEEN_AGAIN

    def _disk_time_s(self) -> float:
        """Return the present time by the clock that the file system sets times of change by."""
        now_s = time.monotonic()
        if now_s - self._compared_s >= self._lost_s * _CLOCK_READ:
            probe = self._folder / f".{secrets.token_hex(8)}"
            with probe.open("xb"):
                pass
            try:
                self._disk_offset_s = probe.stat().st_mtime - now_s
            finally:
                probe.unlink(missing_ok=True)
            self._compared_s = now_s
        return now_s + self._disk_offset_s


@contextmanager
def exclusive(folder: Path, *, lost_s: float = HEARTBEAT_LOST_S) -> Iterator[None]:
    """Keep other processes that enter the same folder out, on all machines that share the disk. For milliseconds.

    It needs no locks of the file system, which some cluster file systems have for one machine only. If a process is
    killed in it, others on its machine enter at once, and those on other machines after `lost_s`.

    Raises RunError if the folder can't be entered within twice that time, DiskError if the disk refuses.
    """
    claims = Claims(folder, "lock", lost_s=lost_s)
    deadline_s = time.monotonic() + 2 * lost_s
    while claims.take("lock") is None:
        if time.monotonic() > deadline_s:
            raise RunError(
                f"{folder} has been in use by other processes for {2 * lost_s:.0f} s. End them, and try again."
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        claims.release("lock")


@final
@dataclass(frozen=True)
class _Holder:
    """What a claim says of the worker that has it."""

    # The time of the last heartbeat.
    touched_ns: int
    is_empty: bool
    # Empty if the claim is, or is damaged.
    facts: dict[str, Any]

    @property
    def description(self) -> str:
        return f"worker {self.facts.get('worker')} (process {self.facts.get('pid')} on {self.facts.get('host')})"

    def has_ended(self) -> bool:
        """Return True if the worker was a process of this machine that is gone."""
        if self.facts.get("processes") != _process_space():
            return False
        pid = self.facts.get("pid")
        if type(pid) is not int or not 0 < pid <= _MAX_PID:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # It is another user's, and may be hidden in /proc.
        except PermissionError:
            return False
        return _start_of(pid) != self.facts.get("started")


def _read_holder(path: Path) -> _Holder | None:
    """Return who has a claim; None if it was removed at this moment, because others have had it since."""
    try:
        # On NFS, opening a file asks the server for its times; `stat` may return old ones.
        with open_regular(path, max_bytes=_MAX_BYTES) as file:
            content = file.read(_MAX_BYTES)
            touched_ns = os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        facts = parse_json(content)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        facts = {}
    return _Holder(touched_ns, is_empty=not content, facts=facts)


@cache
def _process_space() -> str:
    """Return what process ids refer to: this machine since it was started, and a container's own processes.

    Host names don't tell that: containers may share one.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def _start_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since the machine was; None if there is no such process.

    Not by psutil: it converts to a time of day, which differs between two processes if the clock was set.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name of the program, in parentheses, may contain anything.
    fields = status.rpartition(b")")[2].split()
    # A process that was killed, and that its parent hasn't waited for.
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])
