"""Fetch runs from their URL into the local folder that stands for it. No torch.

`fetch_records` gets what lists, comparisons and reports read; `fetch_run` all that resuming needs, and the checkpoint
to resume from; `fetch_checkpoint` one checkpoint. Each file is downloaded under a hidden name, checked and renamed, so
an interrupted fetch leaves nothing that looks complete, and fetching again continues.

A local run directory is a copy, of which `.fetched.json` lists the files, or it was trained here. In a copy, what has
changed at the URL is replaced. A run that was trained here is never changed: if it was resumed elsewhere since, it is
renamed, and a copy takes its place.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from framework.checkpoint import LocalStorage
from framework.checkpoint.layout import (
    BEST,
    LAST,
    MANIFEST_NAME,
    Manifest,
    NewerFormatError,
    decode,
    step_name,
    step_of,
)
from framework.checkpoint.lookup import complete_steps, read_manifest
from framework.config.find_run import is_run
from framework.errors import CheckpointError, FrameworkError, RequestError
from framework.remote.claims import Claim, LocalRecord, newest_claim, note_claim
from framework.remote.place import FETCHED, RemotePlace, is_copy, reason_of
from framework.system.files import FileFacts, content_damage, open_regular
from framework.system.formatting import display_path, format_bytes
from framework.system.run_dir import RunDir, is_locked, read_object, write_object
from framework.system.shown_text import shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CHECKPOINTS = "checkpoints"

_FETCHING = ".fetching_"
_CONFIG = "config.yaml"
_OVERRIDES = "overrides.yaml"
_SWEEP = "sweep.json"
_RECORDS = (".json", ".jsonl", ".yaml")
_MEDIA = "media/"
# A pointer is the name of a checkpoint.
_MAX_POINTER_BYTES = 100
# Between two looks for a checkpoint that is being uploaded.
_POLL_S = 0.5


class RemoteError(RequestError):
    """A URL can't be read."""


class RemoteFile(NamedTuple):
    """One object."""

    size_bytes: int
    # Changes with the content.
    version: str


@final
@dataclass(frozen=True)
class RemoteRun:
    """What is at the URL of one run."""

    place: RemotePlace
    filesystem: AbstractFileSystem
    # By the path in the run; hidden ones are left out.
    files: Mapping[str, RemoteFile]

    def records(self) -> list[str]:
        """Return the files that lists, comparisons and reports read."""
        return [name for name in self.others() if name.startswith(_MEDIA) or name.endswith(_RECORDS)]

    def others(self) -> list[str]:
        """Return all files but the checkpoints, config.yaml last: a run that has one has the other files, too."""
        names = [name for name in self.files if not name.startswith(f"{CHECKPOINTS}/")]
        return sorted(names, key=lambda name: name == _CONFIG)

    def steps(self) -> list[int]:
        """Return the steps of checkpoints that have a manifest."""
        steps = []
        for name in self.files:
            folder, _, file = name.removeprefix(f"{CHECKPOINTS}/").partition("/")
            step = step_of(folder)
            if name.startswith(f"{CHECKPOINTS}/") and step is not None and file == MANIFEST_NAME:
                steps.append(step)
        return sorted(steps)

    def pointer(self, name: str) -> str | None:
        """Return the checkpoint that a pointer names; None if there is none."""
        file = self.files.get(f"{CHECKPOINTS}/{name}")
        if file is None or file.size_bytes > _MAX_POINTER_BYTES:
            return None
        target = self.read(f"{CHECKPOINTS}/{name}").decode(errors="replace").strip()
        return target if step_of(target) is not None else None

    def from_last(self) -> list[int]:
        """Return the steps that a resume may begin from: that of `last`, then the earlier ones, the newest first.

        One that is newer than `last` may be of training that was abandoned.
        """
        steps = self.steps()
        last = self.pointer(LAST)
        if last is not None:
            newest = step_of(last)
            assert newest is not None
            steps = [step for step in steps if step <= newest]
        return sorted(steps, reverse=True)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        content: bytes = self.filesystem.cat_file(f"{self.place.path}/{name}")
        return content

    def manifest(self, checkpoint: str) -> Manifest:
        """Return the manifest of a checkpoint whose files are all there, by their sizes.

        Raises CheckpointError for what can't be used, NewerFormatError for a newer format.
        """
        folder = f"{CHECKPOINTS}/{checkpoint}"
        url = f"{self.place.url}/{folder}"
        if f"{folder}/{MANIFEST_NAME}" not in self.files:
            raise CheckpointError(f"{url} has no {MANIFEST_NAME}: it isn't complete")
        try:
            manifest = decode(self.read(f"{folder}/{MANIFEST_NAME}"), source=url)
        except ValueError as error:
            raise CheckpointError(f"{url}/{MANIFEST_NAME} is damaged ({error})") from error
        if step_of(checkpoint) != manifest.step:
            raise CheckpointError(f"{url}/{MANIFEST_NAME} is of step {manifest.step}")
        for name, facts in manifest.files.items():
            file = self.files.get(f"{folder}/{name}")
            if file is None:
                raise CheckpointError(f"{url}/{name} is missing")
            if file.size_bytes != facts.size_bytes:
                raise CheckpointError(f"{url}/{name} has {file.size_bytes} bytes instead of {facts.size_bytes}")
        return manifest


# What is fetched


def fetch_records(place: RemotePlace) -> None:
    """Fetch the records of all runs and sweeps at a URL and below it. Raises RemoteError if it can't be read."""
    with reading(place):
        filesystem = place.filesystem()
        files = _list(place, filesystem)
        for folder, run_files in _files_of_runs(files).items():
            run = RemoteRun(place.below(*Path(folder).parts), filesystem, _visible(run_files))
            _fetch_copy(run, run.records(), claim=partial(newest_claim, filesystem, run.place.path))
        for folder in _folders_with(files, (_SWEEP,)):
            sweep = place.below(*Path(folder).parts)
            sweep_files = {}
            for name, file in files.items():
                if Path(name).parent == Path(folder) and not name.startswith("."):
                    sweep_files[Path(name).name] = file
            if not sweep.local.exists():
                sweep.make_local()
                _download(RemoteRun(sweep, filesystem, sweep_files), list(sweep_files))


def _files_of_runs(files: Mapping[str, RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    """Return the files of each run by their path in it, by the run's folder. A run may lie in another one."""
    runs: dict[str, dict[str, RemoteFile]] = {folder: {} for folder in _folders_with(files, (_CONFIG, _OVERRIDES))}
    for path, file in files.items():
        parts = path.split("/")
        for depth in range(len(parts)):
            folder = "/".join(parts[:depth])
            if folder in runs:
                runs[folder]["/".join(parts[depth:])] = file
    return runs


def fetch_run(place: RemotePlace) -> None:
    """Fetch the run at a URL, to resume it, with the checkpoint to resume from and the best one.

    If the run was trained on this machine, only a newer checkpoint of the same training is fetched. Nothing is done
    while it is trained here.

    Raises RemoteError if the URL can't be read or isn't a run, CheckpointError if all its checkpoints are damaged.
    """
    with reading(place):
        filesystem = place.filesystem()
        # Before anything is read: who resumes the run meanwhile has a newer one.
        claim = newest_claim(filesystem, place.path)
        run = _listed_run(place, filesystem)
        if run is None:
            if is_run(place.local):
                return
            raise RemoteError(_why_no_run(place, filesystem))
        with _exclusive(place):
            if is_locked(RunDir(place.local)):
                return
            updated = _fetch_copy(run, run.others(), claim=lambda: claim)
            _fetch_last(run, only_newer=not updated)
            if updated:
                _fetch_best(run)
                if claim is not None:
                    note_claim(place.local, claim.number)


def fetch_configuration(place: RemotePlace) -> None:
    """Fetch the run at a URL without its checkpoints, to run it again. Raises RemoteError if it can't be read."""
    with reading(place):
        filesystem = place.filesystem()
        run = _listed_run(place, filesystem)
        if run is None:
            raise RemoteError(_why_no_run(place, filesystem))
        with _exclusive(place):
            _fetch_copy(run, run.others(), claim=partial(newest_claim, filesystem, place.path))


def fetch_checkpoint(place: RemotePlace, name: str) -> Path:
    """Fetch the records of the run at a URL, and one checkpoint; return its local directory.

    Raises RemoteError if the URL can't be read, CheckpointError if the checkpoint is damaged or isn't there.

    Args:
        place: of the run.
        name: the path of the checkpoint in the run, with or without `checkpoints/`: a step's, that of a pointer such as
            `best`, or empty for `last`.
    """
    name = name.removeprefix(CHECKPOINTS).strip("/") or LAST
    with reading(place):
        filesystem = place.filesystem()
        run = _listed_run(place, filesystem)
        if run is None:
            raise RemoteError(_why_no_run(place, filesystem))
        with _exclusive(place):
            updated = _fetch_copy(run, run.others(), claim=partial(newest_claim, filesystem, place.path))
            local = place.local / CHECKPOINTS / name
            if not updated and local.exists():
                return local
            if step_of(name) is not None:
                return _fetch_step(run, name)
            return _fetch_pointed(run, name, points=updated)


def fetch_uploaded(place: RemotePlace, name: str, *, timeout_s: float) -> None:
    """Fetch a checkpoint that node 0 has, once it is uploaded, to a node with a disk of its own.

    Raises RemoteError if it isn't uploaded in time or the URL can't be read, CheckpointError if it is damaged.

    Args:
        place: of the run.
        name: of the checkpoint.
        timeout_s: how long to wait for its upload.
    """
    deadline_s = time.monotonic() + timeout_s
    with reading(place):
        filesystem = place.filesystem()
        while True:
            files = _visible(_list(place, filesystem))
            # The manifest is uploaded last.
            if f"{CHECKPOINTS}/{name}/{MANIFEST_NAME}" in files:
                break
            if time.monotonic() > deadline_s:
                raise RemoteError(
                    f"{place.url}/{CHECKPOINTS}/{name} wasn't uploaded by node 0 within {timeout_s:g} s, and this node "
                    "doesn't have it. Resume the run on node 0's machine, or look there why it isn't uploaded."
                )
            time.sleep(_POLL_S)
        # Of the ranks of a node, the first fetches it.
        with _exclusive(place):
            _fetch_step(RemoteRun(place, filesystem, files), name)


def fetch_weights(place: RemotePlace) -> None:
    """Fetch a file of weights, or a folder of them. Raises RemoteError if it can't be read."""
    with reading(place):
        filesystem = place.filesystem()
        with _exclusive(place):
            files = _list(place, filesystem)
            # The URL is that of one object.
            if "" in files:
                url, _, name = place.url.rpartition("/")
                run = RemoteRun(RemotePlace(url, place.cache), filesystem, {name: files[""]})
                _update(run, [name], are_all=False)
                return
            names = [name for name in _visible(files) if "/" not in name]
            if not names:
                raise RemoteError(f"There is nothing at {place.url}.")
            _update(RemoteRun(place, filesystem, files), names, are_all=False)


def fetch_initial(place: RemotePlace) -> RemotePlace:
    """Fetch what `init_from` names; return its place: of a run, that of the checkpoint."""
    run = run_place(place)
    if run is None:
        fetch_weights(place)
        return place
    directory = fetch_checkpoint(*run)
    return run[0].below(CHECKPOINTS, directory.resolve().name)


def run_place(place: RemotePlace) -> tuple[RemotePlace, str] | None:
    """Return the run that a URL is or lies in, and the path in it; None if there is none."""
    with reading(place):
        filesystem = place.filesystem()
        filesystem.invalidate_cache()
        parts = place.url.split("/")
        # protocol, empty, bucket, then at most RUN/checkpoints/STEP.
        for depth in range(min(3, len(parts) - 3)):
            folder = RemotePlace("/".join(parts[: len(parts) - depth]), place.cache)
            if filesystem.exists(f"{folder.path}/{_OVERRIDES}"):
                return folder, "/".join(parts[len(parts) - depth :])
    return None


# Copies


def _fetch_copy(run: RemoteRun, names: Collection[str], *, claim: Callable[[], Claim | None]) -> bool:
    """Bring these files of a copy up to date, or make one; return False for a run that was trained here.

    claim: returns the newest claim of the run.
    """
    local = run.place.local
    if is_locked(RunDir(local)):
        # Maybe its configuration isn't written yet.
        return False
    if os.path.lexists(local / _CONFIG) and not is_copy(local):
        reason = _why_outdated(run, claim())
        if reason is None:
            return False
        _set_aside(local, reason=reason)

    _update(run, names)
    return True


def _update(run: RemoteRun, names: Collection[str], *, are_all: bool = True) -> None:
    """Download those of these files that have changed since they were fetched.

    are_all: what isn't among the files of `run` is gone at the URL, and removed here.
    """
    run.place.make_local()
    local = run.place.local
    fetched = (read_object(local / FETCHED) or {}).get("files", {})
    changed = [name for name in names if not _is_fetched(local / name, run.files[name], fetched.get(name))]
    # First of all: what is killed before it has all files is a copy, too.
    write_object(local / FETCHED, {"url": run.place.url, "files": fetched})
    _download(run, changed)
    if are_all:
        for name in fetched.keys() - run.files.keys():
            (local / name).unlink(missing_ok=True)
            del fetched[name]
    new = {name: [run.files[name].version, *_stamp(local / name)] for name in changed}
    write_object(local / FETCHED, {"url": run.place.url, "files": fetched | new})


def _why_outdated(run: RemoteRun, claim: Claim | None) -> str | None:
    """Return why the run that was trained here isn't the newest state of it; None if it is.

    It is if nobody else has resumed the run since, and it isn't behind.
    """
    record = LocalRecord.read(run.place.local)
    if claim is None or claim.copy == record.copy:
        return None
    if record.claim is None or claim.number > record.claim:
        return f"the run was resumed since by {claim}"
    newest = max(complete_steps(run.place.local / CHECKPOINTS), default=0)
    if max(run.from_last(), default=0) > newest:
        return f"{claim} has trained it further"
    return None


def _set_aside(local: Path, *, reason: str) -> None:
    """Rename a local run directory."""
    number = 1
    while os.path.lexists(local.with_name(f".{local.name}_{number}")):
        number += 1
    aside = local.with_name(f".{local.name}_{number}")
    local.rename(aside)
    line = f"{display_path(local)} is now {aside.name}, and fetched again: {reason}. Remove it if you don't need it."
    print(shown(line), file=sys.stderr, flush=True)


def _is_fetched(path: Path, file: RemoteFile, entry: Any) -> bool:
    """Return True if the local file is what was fetched of this object. entry: what was noted of it."""
    try:
        return bool(entry == [file.version, *_stamp(path)])
    except OSError:
        return False


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


# Checkpoints


def _fetch_last(run: RemoteRun, *, only_newer: bool) -> None:
    """Fetch the checkpoint to resume from and point `last` to it. Raises CheckpointError if all are damaged.

    only_newer: do nothing if there is a checkpoint here that is as new.
    """
    storage = LocalStorage(run.place.local / CHECKPOINTS)
    newest_local = max(storage.complete_steps(), default=-1)
    faults = []
    for step in run.from_last():
        if only_newer and step <= newest_local:
            return
        try:
            directory = _fetch_step(run, step_name(step))
        except NewerFormatError:
            raise
        except CheckpointError as error:
            faults.append(f"  {error}")
            continue
        for fault in faults:
            print(shown(f"A checkpoint can't be used:\n{fault}\nAn earlier one is."), file=sys.stderr, flush=True)
        storage.point(LAST, directory.name)
        return
    if faults:
        lines = "\n".join(faults)
        raise CheckpointError(
            f"The checkpoints at {run.place.url}, from `{LAST}` back, are damaged:\n{lines}\n"
            "Restore one from a copy, or start a new run."
        )


def _fetch_best(run: RemoteRun) -> None:
    """Fetch the best checkpoint, if that isn't newer than `last`. A damaged one is only reported."""
    target = run.pointer(BEST)
    if target is None or step_of(target) not in run.from_last():
        return
    try:
        _fetch_pointed(run, BEST, points=True)
    except CheckpointError as error:
        print(shown(f"The checkpoint `{BEST}` is left out: {error}"), file=sys.stderr, flush=True)


def _fetch_pointed(run: RemoteRun, pointer: str, *, points: bool) -> Path:
    """Fetch the checkpoint that a pointer names. Raises CheckpointError.

    points: have the local pointer name it, too.
    """
    target = run.pointer(pointer)
    steps = run.steps()
    if target is None and pointer == LAST and steps:
        target = step_name(steps[-1])
    if target is None:
        there = ", ".join(step_name(step) for step in steps) or "none"
        raise CheckpointError(f"There is no checkpoint `{pointer}` at {run.place.url}. Those there: {there}.")
    directory = _fetch_step(run, target)
    if points:
        LocalStorage(directory.parent).point(pointer, target)
    return directory


def _fetch_step(run: RemoteRun, name: str) -> Path:
    """Fetch one checkpoint, unless it is here; return its directory. Raises CheckpointError if it is damaged."""
    manifest = run.manifest(name)
    directory = run.place.local / CHECKPOINTS / name
    if _is_here(directory, manifest):
        return directory
    size = sum(facts.size_bytes for facts in manifest.files.values())
    url = f"{run.place.url}/{CHECKPOINTS}/{name}"
    print(shown(f"Fetching {url} ({format_bytes(size)})"), file=sys.stderr, flush=True)

    hidden = directory.with_name(f"{_FETCHING}{name}")
    shutil.rmtree(hidden, ignore_errors=True)
    for file, facts in manifest.files.items():
        path = hidden / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _fetch_checked(run, f"{CHECKPOINTS}/{name}/{file}", path, facts):
            shutil.rmtree(hidden, ignore_errors=True)
            raise CheckpointError(f"{url}/{file} is damaged: it has another checksum than when it was written")
    (hidden / MANIFEST_NAME).write_bytes(run.read(f"{CHECKPOINTS}/{name}/{MANIFEST_NAME}"))
    for path in (*hidden.rglob("*"), hidden):
        _flush(path)
    if directory.exists():
        # Of the same step, and of training that was abandoned.
        LocalStorage(directory.parent).delete(name)
    hidden.rename(directory)
    _flush(directory.parent)
    return directory


def _fetch_checked(run: RemoteRun, name: str, path: Path, facts: FileFacts) -> bool:
    """Fetch a file; return False if its checksum is wrong, twice: the first time it may be the network's fault."""
    for _ in range(2):
        run.filesystem.get_file(f"{run.place.path}/{name}", str(path))
        if content_damage(partial(open_regular, path), facts) is None:
            return True
    return False


def _is_here(directory: Path, manifest: Manifest) -> bool:
    storage, name = LocalStorage.of(directory)
    if not directory.is_dir() or storage.find_damage(name, thorough=False) is not None:
        return False
    return read_manifest(directory) == manifest


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Objects


def _list(place: RemotePlace, filesystem: AbstractFileSystem) -> dict[str, RemoteFile]:
    """Return the objects at a URL and below it by their path from there, "" for one that is at the URL itself."""
    # Another machine has written since.
    filesystem.invalidate_cache()
    files = {}
    for path, facts in filesystem.find(place.path, detail=True).items():
        name = path.removeprefix(place.path).removeprefix("/")
        # Names that lead elsewhere, which no file system has.
        if ".." not in name.split("/") and facts["type"] == "file":
            files[name] = RemoteFile(size_bytes=int(facts["size"] or 0), version=_version(facts))
    return files


def _version(facts: Mapping[str, Any]) -> str:
    """Return what changes with the content, by what the file system tells."""
    for name in ("ETag", "etag", "md5Hash", "content_settings", "mtime", "last_modified", "LastModified", "created"):
        if facts.get(name) is not None:
            return str(facts[name])
    return str(facts.get("size"))


def _visible(files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Return the files without those that have a hidden part in their path."""
    return {name: file for name, file in files.items() if name and not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or not part for part in name.split("/"))


def _folders_with(files: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the folders that hold files of all these names, "" for the place itself."""
    folders = []
    known = set(files)
    for file in sorted(known):
        folder, _, name = file.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        if name == next(iter(names)) and not _is_hidden(file) and all(f"{prefix}{other}" in known for other in names):
            # A checkpoint has a config.yaml, and no overrides.
            folders.append(folder)
    return folders


def _listed_run(place: RemotePlace, filesystem: AbstractFileSystem) -> RemoteRun | None:
    files = _visible(_list(place, filesystem))
    if _CONFIG not in files or _OVERRIDES not in files:
        return None
    return RemoteRun(place, filesystem, files)


def _why_no_run(place: RemotePlace, filesystem: AbstractFileSystem) -> str:
    files = _list(place, filesystem)
    if not files:
        return f"There is nothing at {place.url}. job=runs path.outputs=URL lists the runs at a URL."
    return (
        f"{place.url} is no run: it lacks {_CONFIG} and {_OVERRIDES}. job=runs path.outputs=URL lists the runs there."
    )


def _download(run: RemoteRun, names: Collection[str]) -> None:
    """Download files to their place in the local directory, each under a hidden name first."""
    local = run.place.local
    hidden = {}
    for name in names:
        path = local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden[name] = path.with_name(f"{_FETCHING}{path.name}")
    if not hidden:
        return
    try:
        # At once, if the file system can.
        run.filesystem.get([f"{run.place.path}/{name}" for name in names], [str(path) for path in hidden.values()])
        for name, path in hidden.items():
            path.replace(local / name)
    finally:
        for path in hidden.values():
            path.unlink(missing_ok=True)


@contextmanager
def _exclusive(place: RemotePlace) -> Iterator[None]:
    """Keep other processes of this machine from fetching the same."""
    from filelock import FileLock

    RemotePlace(place.url.rpartition("/")[0], place.cache).make_local()
    with FileLock(place.local.with_name(f"{_FETCHING}{place.local.name}.lock")):
        yield


@contextmanager
def reading(place: RemotePlace) -> Iterator[None]:
    """Raise RemoteError, which says what to do, if the block can't read a URL."""
    try:
        yield
    except FrameworkError:
        raise
    # Each of fsspec's file systems raises errors of its own.
    except Exception as error:
        raise RemoteError(f"{place.url} can't be read: {reason_of(error)}.\n{_advice(error)}") from error


def _advice(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or "Credentials" in name or "Auth" in name:
        return "Check the credentials of this machine, and what they allow; see docs/remote.md."
    if isinstance(error, FileNotFoundError):
        return "Check the name of the bucket and of the folder."
    if isinstance(error, OSError) and error.filename is not None:
        return "Make room, or choose another folder with path.cache=FOLDER."
    return "Check the network and the server's address; see docs/remote.md. What is on this machine is unchanged."
