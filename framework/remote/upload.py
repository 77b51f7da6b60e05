"""What a command uploads of a run directory, in which order, and what it deletes at the URL. No torch.

A pass uploads the files that have changed, and the newest checkpoint that isn't at the URL yet: its files, then the
run's records and metrics as they are by then, then its manifest, then the pointers. So whatever is killed at any
moment, a manifest at the URL is of a complete checkpoint, and the metrics beside it reach at least to its step.

At the URL a run looks as it does here, except that `checkpoints/last` is a file with the name of a checkpoint, not a
symlink. Hidden files, the run's secrets and other symlinks aren't uploaded.
"""

from __future__ import annotations

import fnmatch
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, NamedTuple, final

from framework.checkpoint.layout import LAST, MANIFEST_NAME, Manifest, decode, step_name, step_of, steps_of
from framework.checkpoint.retention import Retention
from framework.checkpoint.storage import LocalStorage
from framework.config.parse import parse
from framework.config.saved import load_config
from framework.config.schema import CheckpointConfig
from framework.errors import CheckpointError, FrameworkError
from framework.remote.claims import (
    Claim,
    ClaimedError,
    LocalRecord,
    claim_run,
    make_parents,
    newest_claim,
)
from framework.remote.place import RemotePlace
from framework.system.files import open_regular, read_bytes
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CHECKPOINTS = "checkpoints"

# Up to this size a file is read as a whole and uploaded from memory, 8 MiB; a larger one is copied first, since it may
# grow or change meanwhile. Checkpoints are uploaded as they are, in parts.
_IN_MEMORY_BYTES = 2**23
_COPY = ".uploading_"
# A file that grows is uploaded as a whole each time: for a tenth of the time at most.
_SHARE = 0.1
# What the framework itself removes when a run is resumed.
_FAILURE_REPORTS = "failure*.json"
_RUN_FILE = "run.json"


class Stamp(NamedTuple):
    """What tells one content of a file from another."""

    size_bytes: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> Stamp:
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


@final
@dataclass(frozen=True)
class Left:
    """What isn't uploaded."""

    # Paths in the run directory; of a checkpoint, its directory.
    names: tuple[str, ...] = ()
    size_bytes: int = 0


@final
@dataclass
class _Checkpoints:
    """A folder of checkpoints, such as that of one trial of a sweep, and what is known of it at the URL."""

    # Path in the run directory.
    name: str
    # How many stay; None if the run's configuration can't be read: then none is deleted.
    settings: CheckpointConfig | None
    # Of each checkpoint that is complete at the URL.
    manifests: dict[int, bytes] = field(default_factory=dict)
    # Of each checkpoint that is the same here and at the URL: the stamp of its manifest here.
    own: dict[int, Stamp] = field(default_factory=dict)
    pointers: dict[str, str] = field(default_factory=dict)


@final
class Uploader:
    """Uploads one directory to its URL, pass by pass. Errors are the file system's: call again after them.

    The directory is that of a run, or of a sweep, with the runs in it.
    """

    def __init__(
        self,
        place: RemotePlace,
        *,
        only: Collection[str] = (),
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Upload nothing yet.

        Args:
            place: the URL, and the directory.
            only: patterns of paths, for a node that uploads its own logs of a run that node 0 has claimed; empty: all.
            on_progress: called whenever a part of a file was uploaded.
        """
        self._place = place
        self._only = tuple(only)
        self._on_progress = on_progress
        self._clock = clock
        self._filesystem: AbstractFileSystem | None = None
        self._root = ""
        self._record = LocalRecord.read(place.local)
        self._claim: Claim | None = None
        # If the claim was checked in the present pass.
        self._is_claim_checked = False
        # Path → stamp of what is at the URL.
        self._stamps = {name: Stamp(*stamp) for name, stamp in self._record.files.items()}
        # Path → when a file that grows may be uploaded again.
        self._due_s: dict[str, float] = {}
        self._checkpoints: dict[str, _Checkpoints] = {}

    # Connection and claim

    def connect(self) -> None:
        """Make a new connection: credentials are read again. Raises ConfigError if a package is missing."""
        import fsspec

        from framework.remote.place import check_protocol

        check_protocol(self._place.url)
        options = {}
        if self._place.url.startswith(("s3://", "s3a://")):
            # Of 50 MiB each, in memory.
            options["max_concurrency"] = 2
        self._filesystem, self._root = fsspec.core.url_to_fs(
            self._place.url, skip_instance_cache=True, use_listings_cache=False, **options
        )

    @property
    def filesystem(self) -> AbstractFileSystem:
        if self._filesystem is None:
            self.connect()
        assert self._filesystem is not None
        return self._filesystem

    def _path(self, name: str) -> str:
        """Return the path in the file system of a file of the run."""
        self.filesystem  # noqa: B018  # connects
        return f"{self._root}/{name}"

    @property
    def has_claim(self) -> bool:
        return self._claim is not None

    @property
    def is_new(self) -> bool:
        """Return True if this command is the first that has claimed the run."""
        return self._claim is not None and self._claim.number == 1

    def hold_claim(self) -> None:
        """Claim the run, or check that this command still has it.

        Raises ClaimedError if another machine has it by now. If the run was deleted at the URL, it is claimed and
        uploaded again.
        """
        newest = newest_claim(self.filesystem, self._root)
        self._is_claim_checked = True
        if newest is not None and self._claim is not None:
            if newest.number > self._claim.number and newest.copy != self._record.copy:
                raise ClaimedError(f"it was resumed by {newest}")
            return
        if newest is None or newest.copy != self._record.copy:
            # It is new, was deleted at the URL, or another machine has uploaded since.
            self._stamps.clear()
            self._checkpoints.clear()
        self._claim = claim_run(self.filesystem, self._root, self._record, url=self._place.url)
        self._record = replace(self._record, claim=self._claim.number)
        self._write_record()

    def _write_record(self) -> None:
        if self._only:
            return
        files = {name: list(stamp) for name, stamp in self._stamps.items()}
        self._record = replace(self._record, files=files)
        # A full disk, or one that is gone: the next command uploads more than it must.
        with suppress(OSError):
            self._record.write(self._place.local)

    def remove(self) -> None:
        """Delete the run at the URL, which this command has just made."""
        self.filesystem.rm(self._root, recursive=True)

    # A pass

    def upload(self, *, at_once: bool = False) -> bool:
        """Upload what has changed and the newest missing checkpoint. Return True if there may be more to upload now.

        Args:
            at_once: upload files that grow as well, however recently that was done.
        """
        if not self._place.local.is_dir():
            return False
        self._is_claim_checked = bool(self._only)
        is_changed = False
        try:
            files, folders = self._look()
            is_changed = self._upload_files(files, at_once=at_once)
            if self._only:
                return False
            self._delete_failure_reports()
            for name in folders:
                checkpoints = self._checkpoints_of(name)
                missing = self._missing_steps(checkpoints)
                if missing:
                    self._upload_step(checkpoints, max(missing))
                    is_changed = True
                    self._point(checkpoints)
                    self._delete_superseded(checkpoints)
                    return True
                is_changed = self._point(checkpoints) or is_changed
        finally:
            if is_changed:
                self._write_record()
        return False

    def left(self) -> Left:
        """Return what isn't uploaded; asks nothing of the URL."""
        names = []
        size_bytes = 0
        files, folders = self._look()
        for name, path in files.items():
            with suppress(OSError):
                stamp = Stamp.of(path.stat())
                if self._stamps.get(name) != stamp:
                    names.append(name)
                    size_bytes += stamp.size_bytes
        for folder in folders:
            known = self._checkpoints.get(folder, _Checkpoints(folder, None))
            for step, manifest in self._missing_steps(known).items():
                names.append(f"{folder}/{step_name(step)}")
                size_bytes += sum(facts.size_bytes for facts in manifest.files.values())
        return Left(tuple(names), size_bytes)

    def _look(self) -> tuple[dict[str, Path], list[str]]:
        """Return the files to upload, by their paths in the run directory, and the folders of checkpoints."""
        files: dict[str, Path] = {}
        checkpoints = []
        root = self._place.local
        for place, folders, names in os.walk(root):
            below = Path(place).relative_to(root)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if CHECKPOINTS in folders and (Path(place) / RunDir(root).run_file.name).exists():
                folders.remove(CHECKPOINTS)
                if not self._only:
                    checkpoints.append((below / CHECKPOINTS).as_posix())
            for name in sorted(names):
                path = Path(place, name)
                is_uploaded = not name.startswith(".") and name != RunDir(root).secrets_file.name
                if is_uploaded and path.is_file() and not path.is_symlink():
                    relative = (below / name).as_posix()
                    if not self._only or any(fnmatch.fnmatch(relative, pattern) for pattern in self._only):
                        files[relative] = path
        return files, checkpoints

    # Files that may change

    def _upload_files(self, files: dict[str, Path], *, at_once: bool) -> bool:
        """Upload the files that have changed; return True if any was uploaded.

        `run.json` may say that something was logged, such as the test; then that must be at the URL, too. So it is read
        before the others are looked at, and uploaded after them, but not while one that has changed has to wait.
        """
        is_changed = False
        is_waiting = False
        with ExitStack() as stack:
            records: dict[str, _Content | None] = {}
            for name, path in files.items():
                # It may be replaced or removed at any moment.
                with suppress(FileNotFoundError):
                    if path.name == _RUN_FILE and self._has_changed(name, path):
                        records[name] = stack.enter_context(_unchanging(path, folder=self._place.local))

            for name, path in files.items():
                with suppress(FileNotFoundError):
                    if path.name == _RUN_FILE or not self._has_changed(name, path):
                        continue
                    if not at_once and self._clock() < self._due_s.get(name, 0.0):
                        is_waiting = True
                        continue
                    with _unchanging(path, folder=self._place.local) as content:
                        if content is None:
                            is_waiting = True
                            continue
                        self._upload_content(content, name)
                        is_changed = True

            if not is_waiting:
                for name, content in records.items():
                    if content is not None:
                        self._upload_content(content, name)
                        is_changed = True
        return is_changed

    def _has_changed(self, name: str, path: Path) -> bool:
        """Return True unless this content of a file is at the URL. Raises FileNotFoundError if the file is gone."""
        return Stamp.of(path.stat()) != self._stamps.get(name)

    def _upload_content(self, content: _Content, name: str) -> None:
        begun_s = self._clock()
        self._put(content.data, name)
        self._due_s[name] = self._clock() + (self._clock() - begun_s) / _SHARE
        self._stamps[name] = content.stamp

    def _put(self, data: bytes | Path, name: str) -> None:
        from fsspec.callbacks import Callback

        if not self._is_claim_checked:
            self.hold_claim()
        path = self._path(name)
        make_parents(self.filesystem, path)
        progress = Callback(hooks={"progress": lambda *_, **__: self._on_progress()})
        try:
            if isinstance(data, bytes):
                self.filesystem.pipe_file(path, data)
            else:
                self.filesystem.put_file(str(data), path, callback=progress)
        except FileNotFoundError as error:
            # Not a file of this machine.
            if isinstance(data, bytes) or data.exists():
                raise OSError(str(error)) from error
            raise
        self._on_progress()

    def _delete_failure_reports(self) -> None:
        """Delete those that are no longer here: the run was resumed."""
        gone = []
        for name in self._stamps:
            is_report = fnmatch.fnmatch(Path(name).name, _FAILURE_REPORTS)
            if is_report and not (self._place.local / name).exists():
                gone.append(name)
        for name in gone:
            with suppress(FileNotFoundError):
                self.filesystem.rm_file(self._path(name))
            del self._stamps[name]

    # Checkpoints

    def _checkpoints_of(self, name: str) -> _Checkpoints:
        """Return what is known of a folder of checkpoints; the first time, read what is at the URL.

        Then also delete what a killed command has uploaded of a checkpoint that is gone.
        """
        if name in self._checkpoints:
            return self._checkpoints[name]
        folder = self._place.local / name
        checkpoints = _Checkpoints(name, _settings_of(folder.parent))
        for entry in self._list(name):
            path = self._path(f"{name}/{entry}")
            step = step_of(entry)
            try:
                if step is None:
                    checkpoints.pointers[entry] = self.filesystem.cat_file(path).decode(errors="replace")
                else:
                    checkpoints.manifests[step] = self.filesystem.cat_file(f"{path}/{MANIFEST_NAME}")
            except FileNotFoundError:
                if step is not None and not (folder / entry).exists():
                    self._delete_step(checkpoints, step)
        self._checkpoints[name] = checkpoints
        return checkpoints

    def _list(self, name: str) -> list[str]:
        try:
            paths = self.filesystem.ls(self._path(name), detail=False)
        except FileNotFoundError:
            return []
        return [Path(path).name for path in paths]

    def _missing_steps(self, checkpoints: _Checkpoints) -> dict[int, Manifest]:
        """Return the complete checkpoints that aren't at the URL, as far as is known, the newest first."""
        storage = LocalStorage(self._place.local / checkpoints.name)
        missing = {}
        for step in sorted(steps_of(storage.list()), reverse=True):
            name = step_name(step)
            with suppress(FileNotFoundError):
                path = storage.folder / name / MANIFEST_NAME
                stamp = Stamp.of(path.stat())
                if checkpoints.own.get(step) == stamp:
                    continue
                if checkpoints.manifests.get(step) == read_bytes(path):
                    checkpoints.own[step] = stamp
                    continue
                manifest = storage.manifest_or_none(name)
                if manifest is not None and storage.find_damage(name, thorough=False) is None:
                    missing[step] = manifest
        for step in self._superseded(checkpoints, missing):
            missing.pop(step, None)
        return missing

    def _superseded(self, checkpoints: _Checkpoints, missing: Mapping[int, Manifest]) -> list[int]:
        """Return the steps that the run's retention doesn't keep, of those at the URL and those to upload.

        Never one at the URL of which this command doesn't know that it is superseded.
        """
        settings = checkpoints.settings
        local = LocalStorage(self._place.local / checkpoints.name)
        pointers = local.pointers()
        last = step_of(pointers.get(LAST, ""))
        if settings is None or last is None or settings.save_top_k == -1:
            return []

        manifests = dict(missing)
        abandoned = []
        present = steps_of(local.list())
        for step, content in checkpoints.manifests.items():
            manifest = _manifest_or_none(content)
            if manifest is not None and step <= last:
                manifests.setdefault(step, manifest)
            elif step > last and step in checkpoints.own and step not in present:
                # Training was resumed from an earlier step, and has deleted it here.
                abandoned.append(step)

        retention = Retention(settings)
        for step, manifest in manifests.items():
            retention.add(step, manifest.metrics)
        pointed = steps_of([*checkpoints.pointers.values(), *pointers.values()])
        return [*retention.to_delete(last, pointed=pointed), *abandoned]

    def _upload_step(self, checkpoints: _Checkpoints, step: int) -> None:
        """Upload a checkpoint. If it is deleted or replaced meanwhile, it doesn't become complete."""
        name = f"{checkpoints.name}/{step_name(step)}"
        directory = self._place.local / name
        manifest_path = directory / MANIFEST_NAME
        try:
            stamp = Stamp.of(manifest_path.stat())
            content = read_bytes(manifest_path)
            manifest = decode(content, source=manifest_path)
            if checkpoints.manifests.pop(step, None) is not None:
                # Of another training: it was resumed from an earlier step. Until all is replaced, it is incomplete.
                self.filesystem.rm_file(self._path(f"{name}/{MANIFEST_NAME}"))
            for file in manifest.files:
                self._put(directory / file, f"{name}/{file}")
            files, _ = self._look()
            self._upload_files(files, at_once=True)
            if Stamp.of(manifest_path.stat()) != stamp:
                return
        except FileNotFoundError:
            if manifest_path.exists():
                raise
            self._delete_step(checkpoints, step)
            return
        self._check_sizes(name, manifest)
        # Another machine may have resumed the run while the files were uploaded.
        claim = self._claim
        self.hold_claim()
        if self._claim is not claim:
            # The run was deleted at the URL, with files of this checkpoint.
            return
        self._put(content, f"{name}/{MANIFEST_NAME}")
        checkpoints.manifests[step] = content
        checkpoints.own[step] = stamp

    def _check_sizes(self, name: str, manifest: Manifest) -> None:
        """Raise OSError if a file of a checkpoint isn't at the URL with its size."""
        folder = self._path(name)
        found = self.filesystem.find(folder, detail=True)
        sizes = {path.rpartition(f"{name}/")[2]: facts["size"] for path, facts in found.items()}
        for file, facts in manifest.files.items():
            if sizes.get(file) != facts.size_bytes:
                raise OSError(
                    f"{folder}/{file} has {sizes.get(file, 'no')} bytes instead of {facts.size_bytes} after its upload"
                )

    def _point(self, checkpoints: _Checkpoints) -> bool:
        """Upload what `last`, `best` and the user's symlinks name, if that is at the URL. Return True for a change."""
        is_changed = False
        for pointer, checkpoint in LocalStorage(self._place.local / checkpoints.name).pointers().items():
            is_there = step_of(checkpoint) in checkpoints.own
            if is_there and checkpoints.pointers.get(pointer) != checkpoint:
                self._put(checkpoint.encode(), f"{checkpoints.name}/{pointer}")
                checkpoints.pointers[pointer] = checkpoint
                is_changed = True
        return is_changed

    def _delete_superseded(self, checkpoints: _Checkpoints) -> None:
        """Delete at the URL what the run's retention doesn't keep, once what replaces it is there."""
        if LAST in checkpoints.pointers:
            for step in self._superseded(checkpoints, {}):
                self._delete_step(checkpoints, step)

    def _delete_step(self, checkpoints: _Checkpoints, step: int) -> None:
        """Delete a checkpoint at the URL, or what was uploaded of it; its manifest first."""
        folder = self._path(f"{checkpoints.name}/{step_name(step)}")
        with suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{folder}/{MANIFEST_NAME}")
        checkpoints.manifests.pop(step, None)
        checkpoints.own.pop(step, None)
        with suppress(FileNotFoundError):
            self.filesystem.rm(folder, recursive=True)


class _Content(NamedTuple):
    # In memory, or in a copy.
    data: bytes | Path
    stamp: Stamp


@contextmanager
def _unchanging(path: Path, *, folder: Path) -> Iterator[_Content | None]:
    """Yield what a file holds at this moment; None if it was rewritten while it was read.

    Of a file that grows, it is what was there at the beginning, which it once was as a whole.

    Args:
        folder: for a copy, on the same disk.
    """
    with open_regular(path) as file:
        before = os.fstat(file.fileno())
        if before.st_size <= _IN_MEMORY_BYTES:
            data = file.read(before.st_size)
            yield _checked(file, data, size_bytes=len(data), before=before)
            return
        with tempfile.NamedTemporaryFile(prefix=_COPY, dir=folder) as copy:
            size_bytes = _copy(file, copy, size_bytes=before.st_size)
            copy.flush()
            yield _checked(file, Path(copy.name), size_bytes=size_bytes, before=before)


def _checked(file: BinaryIO, data: bytes | Path, *, size_bytes: int, before: os.stat_result) -> _Content | None:
    """Return what was read of a file; None if it was rewritten meanwhile.

    Args:
        size_bytes: how much was read.
        before: the file's status before.
    """
    after = os.fstat(file.fileno())
    is_rewritten = after.st_size <= before.st_size and after.st_mtime_ns != before.st_mtime_ns
    if is_rewritten or size_bytes != before.st_size:
        return None
    return _Content(data, Stamp.of(before))


def _copy(source: BinaryIO, target: IO[bytes], *, size_bytes: int) -> int:
    """Copy at most so many bytes; return how many it were."""
    num_copied = 0
    while num_copied < size_bytes:
        part = source.read(min(_IN_MEMORY_BYTES, size_bytes - num_copied))
        if not part:
            break
        target.write(part)
        num_copied += len(part)
    return num_copied


def _manifest_or_none(content: bytes) -> Manifest | None:
    """Return a manifest; None if it is damaged, or of a newer framework."""
    try:
        return decode(content, source=MANIFEST_NAME)
    except (ValueError, CheckpointError):
        return None


def _settings_of(run_dir: Path) -> CheckpointConfig | None:
    """Return the `checkpoint` section of a run's configuration; None if it can't be read."""
    try:
        return parse(load_config(RunDir(run_dir))).checkpoint
    except FrameworkError:
        return None
