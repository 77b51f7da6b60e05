"""The run directory: made by one process alone, used by one at a time, its small files replaced whole."""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from framework.errors import RequestError
from tests.helpers.internals import RunDir, create_run_dir, locked, new_run_dir, run_dir_module, write_atomically

ROOT = Path(run_dir_module.__file__).parents[2]


class Noon(datetime):
    """A clock that stands still: every directory is made in the same second."""

    @classmethod
    def now(cls, _tz: Any = None) -> Noon:
        return cls(2030, 1, 2, 12, 0, 0)


def test_a_run_is_named_by_time_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir_module, "datetime", Noon)
    run_dir = create_run_dir(Path("outputs", "some"))
    assert run_dir.path.parent == (tmp_path / "outputs" / "some").resolve()
    assert re.fullmatch("2030-01-02_12-00-00_[0-9a-f]{4}", run_dir.path.name)
    assert list(run_dir.path.iterdir()) == []


def test_simultaneous_runs_never_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only 16 names are possible; making the directory is what decides, as between processes."""
    own = random.Random(0)
    monkeypatch.setattr(run_dir_module, "datetime", Noon)
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"{own.randrange(16):04x}")
    together = threading.Barrier(8)

    def one(_: int) -> Path:
        together.wait(timeout=30.0)
        return create_run_dir(tmp_path / "some").path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(one, range(8)))
    assert len(set(paths)) == 8
    assert set((tmp_path / "some").iterdir()) == {path.resolve() for path in paths}
    monkeypatch.setattr(secrets, "token_hex", lambda _: "000a")
    (create_run_dir(tmp_path / "other").path / "mine").touch()
    with pytest.raises(RequestError, match="exists already"):
        create_run_dir(tmp_path / "other")
    assert len(list(tmp_path.glob("other/*/mine"))) == 1


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    def refuse(parent: Path, *, beside: bool = False) -> None:
        with pytest.raises(RequestError), new_run_dir(parent) as run_dir:  # noqa: PT012
            run_dir.run_file.write_text("refused")
            if beside:
                create_run_dir(parent, name="other")
            raise RequestError("refused")

    refuse(tmp_path / "outputs" / "some" / "eval")
    assert list(tmp_path.iterdir()) == []
    refuse(tmp_path / "outputs" / "some", beside=True)
    assert [path.name for path in (tmp_path / "outputs" / "some").iterdir()] == ["other"]
    (tmp_path / "mine").mkdir()
    refuse(tmp_path / "mine")
    assert list(tmp_path.glob("mine/*")) == []


# Small files


def test_readers_see_only_whole_facts(tmp_path: Path) -> None:
    """While one thread writes longer and shorter contents, another never reads a part, nor an older one again."""
    run_dir = RunDir(tmp_path)
    with pytest.raises(OSError, match=r"run\.json"):
        run_dir.read_run()
    run_dir.update_run({"number": 0, "command": "é"})
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
    assert seen == sorted(seen)
    assert run_dir.read_run() == {"number": 59, "command": "é", "filling": "x" * 100_000}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_content_is_flushed_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.json"
    write_atomically(path, "old")
    fsync = os.fsync
    flushed = []

    def noted(descriptor: int) -> None:
        assert path.read_text() == "old"
        flushed.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomically(path, "newer")
    assert (flushed, path.read_text()) == ([5], "newer")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "x" * 100)
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path]


# Locks


def running(run_dir: RunDir) -> None:
    """Say in run.json that this process runs it, as a job does at its beginning."""
    run_dir.update_run({"status": "running", "process": {"pid": os.getpid(), "host": "there"}})


def assert_in_use(run_dir: RunDir, by: str) -> None:
    with pytest.raises(RequestError, match=rf"in use by {by}\.") as caught:
        locked(run_dir).__enter__()
    assert str(run_dir.path) in str(caught.value)


def test_records_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from framework.system.run_dir import write_atomically\n"
    program += "write_atomically(Path(sys.argv[1]), '\\u00e9\\u2013')"
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment = {**os.environ, **ascii_only, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "record")], env=environment, check=True)
    assert (tmp_path / "record").read_text(encoding="utf-8") == "é–"


def test_one_process_at_a_time_uses_a_run(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "some")
    with locked(run_dir):
        assert_in_use(run_dir, "another process")
        running(run_dir)
        assert_in_use(run_dir, f"process {os.getpid()} on there")
        # The record is of an earlier start: who uses the run now is unknown.
        run_dir.update_run({"status": "finished"})
        assert_in_use(run_dir, "another process")
    with locked(run_dir):
        pass
    assert {path.name for path in run_dir.path.iterdir()} == {"run.json"}


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "some")
    program = "import sys; from pathlib import Path; from tests.helpers.internals import RunDir, locked\n"
    program += "with locked(RunDir(Path(sys.argv[1]))):\n    print('in', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(run_dir.path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        assert_in_use(run_dir, "another process")
        other.kill()
    with locked(run_dir):
        pass
