from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import secrets
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from framework import run_dir as run_dir_module
from framework.errors import RequestError
from framework.run_dir import RunDir, create_run_dir, locked, new_run_dir, write_atomically

# Makes one directory as soon as the file `go` is there, with names of which only 16 are possible in a second.
_ONE_OF_MANY = """
import random, sys, time
from pathlib import Path
from framework import run_dir
run_dir.secrets.token_hex = lambda _: f"{random.randrange(16):04x}"
print("ready", flush=True)
while not Path("go").exists():
    pass
print(run_dir.create_run_dir(Path("outputs", "some")).path)
"""


def test_the_layout_is_the_same_for_every_run(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "outputs" / "some")
    assert run_dir.path.parent == (tmp_path / "outputs" / "some").resolve()
    time, token = run_dir.path.name.rsplit("_", 1)
    assert abs((datetime.now() - datetime.strptime(time, "%Y-%m-%d_%H-%M-%S")).total_seconds()) < 60
    assert len(token) == 4
    assert int(token, 16) >= 0
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["logs"]
    assert run_dir.rank_log(3) == run_dir.logs / "rank_3.log"
    named = (
        run_dir.config_file,
        run_dir.overrides_file,
        run_dir.run_file,
        run_dir.tensorboard,
        run_dir.metrics_file,
        run_dir.failure_file,
    )
    assert [path.name for path in named] == [
        "config.yaml",
        "overrides.yaml",
        "run.json",
        "tensorboard",
        "metrics.jsonl",
        "failure.json",
    ]
    assert {path.parent for path in named} == {run_dir.path}


def test_the_path_is_absolute_and_the_value_touches_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_run_dir(Path("outputs", "some")).path.is_absolute()
    RunDir(tmp_path / "never")
    assert not (tmp_path / "never").exists()


class Noon(datetime):
    """A clock that stands still: every directory is made in the same second."""

    @classmethod
    def now(cls, _tz: Any = None) -> Noon:
        return cls(2030, 1, 2, 12, 0, 0)


def test_threads_in_the_same_second_never_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = random.Random(0)
    monkeypatch.setattr(run_dir_module, "datetime", Noon)
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"{own.randrange(16):04x}")
    together = threading.Barrier(8)

    def one(_: int) -> Path:
        together.wait(timeout=10.0)
        return create_run_dir(tmp_path / "some").path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(one, range(8)))
    assert len(set(paths)) == 8
    assert set((tmp_path / "some").iterdir()) == {path.resolve() for path in paths}
    assert all(path.name.startswith("2030-01-02_12-00-00_") for path in paths)


def test_processes_in_the_same_instant_never_share_a_directory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(run_dir_module.__file__).parents[1])}
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", _ONE_OF_MANY], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    try:
        for command in commands:
            assert command.stdout is not None
            assert command.stdout.readline() == "ready\n"
        (tmp_path / "go").touch()
        paths = [command.communicate(timeout=20.0)[0].strip() for command in commands]
    finally:
        for command in commands:
            command.kill()
            command.communicate()
    assert len(set(paths)) == 6
    assert all(Path(path, "logs").is_dir() for path in paths)


def test_when_every_name_is_taken_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir_module, "datetime", Noon)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "abcd")
    taken = create_run_dir(tmp_path / "some").path
    (taken / "mine").touch()
    with pytest.raises(RequestError, match="were all taken"):
        create_run_dir(tmp_path / "some")
    assert (taken / "mine").exists()


def test_a_refused_run_leaves_nothing_and_no_other_run_goes_with_it(tmp_path: Path) -> None:
    def refuse(parent: Path, *, beside: bool = False) -> None:
        with new_run_dir(parent) as run_dir:
            run_dir.rank_log(0).write_text("refused")
            if beside:
                create_run_dir(parent, name="other")
            raise RequestError("refused")

    with pytest.raises(RequestError):
        refuse(tmp_path / "outputs" / "some" / "eval")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RequestError):
        refuse(tmp_path / "outputs" / "some", beside=True)
    assert [path.name for path in (tmp_path / "outputs" / "some").iterdir()] == ["other"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(RequestError):
        refuse(tmp_path / "mine")
    assert list(tmp_path.glob("mine/*")) == []


@pytest.mark.parametrize("in_the_way", ["outputs", "outputs/some"])
def test_a_place_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path, in_the_way: str) -> None:
    path = tmp_path / in_the_way
    path.parent.mkdir(exist_ok=True)
    path.write_text("a file")
    with pytest.raises(RequestError, match=r"(?s)can't be made under .*outputs/some: .*path\.outputs=FOLDER") as error:
        create_run_dir(tmp_path / "outputs" / "some")
    assert error.value.exit_status == 2
    assert path.read_text() == "a file"


def test_facts_are_added_and_the_newest_counts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with pytest.raises(OSError, match=r"run\.json"):
        run_dir.read_run()
    run_dir.update_run({"status": "running", "command": "é"})
    run_dir.update_run({"status": "finished", "results": {"steps": 3}})
    assert run_dir.read_run() == {"status": "finished", "command": "é", "results": {"steps": 3}}


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """While one thread writes longer and shorter contents, another reads only whole ones, and no older one after."""
    run_dir = RunDir(tmp_path)
    run_dir.update_run({"number": 0})
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(run_dir.read_run()["number"])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, 60):
            run_dir.update_run({"number": number, "filling": "x" * (100_000 * (number % 2))})
    finally:
        done.set()
        reader.join()
    assert len(set(seen)) > 5
    assert seen == sorted(seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.json"
    write_atomically(path, json.dumps({"old": True}))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "x" * 100)
    assert json.loads(path.read_text()) == {"old": True}


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.json"
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_sync(fd: int) -> None:
        order.append(f"sync {os.fstat(fd).st_size}")
        fsync(fd)

    def noted_replace(old: Path, new: Path) -> Path:
        order.append(f"name {new.name}")
        return replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_atomically(path, "hello")
    assert order == ["sync 5", "name some.json"]


def running(run_dir: RunDir) -> None:
    """Say in run.json that this process runs it, as a job does at its beginning."""
    run_dir.update_run({"status": "running", "process": {"pid": os.getpid(), "host": "there"}})


def test_one_process_at_a_time_is_in_a_run(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "some")
    names = {path.name for path in run_dir.path.iterdir()}
    with locked(run_dir), pytest.raises(RequestError, match=r"in use by another process\.") as caught:
        locked(run_dir).__enter__()
    assert str(run_dir.path) in str(caught.value)
    with locked(run_dir):
        running(run_dir)
        with pytest.raises(RequestError, match=rf"in use by process {os.getpid()} on there\."):
            locked(run_dir).__enter__()
        run_dir.update_run({"status": "finished"})  # of an earlier beginning: nothing is said of who is in it now
        with pytest.raises(RequestError, match=r"in use by another process\."):
            locked(run_dir).__enter__()
    assert {path.name for path in run_dir.path.iterdir()} == names | {"run.json"}


@pytest.fixture
def no_directory_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where only what can be written to can be locked."""
    flock = fcntl.flock

    def refuse(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_directory_locks")
@pytest.mark.parametrize("well", [True, False])
def test_where_directories_cannot_be_locked_a_file_is_and_is_removed(tmp_path: Path, well: bool) -> None:
    run_dir = create_run_dir(tmp_path / "some")
    with nullcontext() if well else pytest.raises(ZeroDivisionError), locked(run_dir):
        running(run_dir)
        assert run_dir.lock_file.exists()
        with pytest.raises(RequestError, match=rf"in use by process {os.getpid()} on there\."):
            locked(run_dir).__enter__()
        assert run_dir.lock_file.exists()
        assert well or 1 / 0
    assert not run_dir.lock_file.exists()


@pytest.mark.usefixtures("no_directory_locks")
def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens the file, and takes its lock only after the one that had it has removed it."""
    run_dir = create_run_dir(tmp_path / "some")
    opened = run_dir_module._open_lock
    removals = [True, True]

    def open_and_lose(run_dir: RunDir) -> int:
        lock = opened(run_dir)
        if removals and removals.pop():
            run_dir.lock_file.unlink()
        return lock

    monkeypatch.setattr(run_dir_module, "_open_lock", open_and_lose)
    with locked(run_dir):
        assert removals == []
        with pytest.raises(RequestError, match="in use"):
            locked(run_dir).__enter__()


def test_a_file_system_without_locks_is_not_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run_dir = create_run_dir(tmp_path / "some")
    with locked(run_dir), locked(run_dir):
        pass
    assert not run_dir.lock_file.exists()


def test_a_lock_is_gone_with_the_process_that_had_it(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "some")
    environment = {**os.environ, "PYTHONPATH": str(Path(run_dir_module.__file__).parents[1])}
    program = "import sys, time; from pathlib import Path; from framework.run_dir import RunDir, locked\n"
    program += "with locked(RunDir(Path(sys.argv[1]))):\n    print('in', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(run_dir.path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RequestError, match="in use by another process"):
            locked(run_dir).__enter__()
        other.kill()
    with locked(run_dir):
        pass
