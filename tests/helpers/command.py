"""Running `python -m framework` as a user does: a deadline on everything, and no process may stay behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

import psutil

from tests.helpers import processes

ROOT = Path(__file__).resolve().parents[2]
LINGER_S = 3.0
"""How long processes may take to be gone once the command has ended: the kernel ends orphans soon, not in no time."""


@final
@dataclass(frozen=True)
class Started:
    """A command that is running. `mark` finds all its processes; output goes to files, so no orphan can block it."""

    process: subprocess.Popen[bytes]
    mark: str
    out: IO[bytes]
    err: IO[bytes]

    def stdout(self) -> str:
        """What it has printed so far."""
        return _content(self.out)

    def stderr(self) -> str:
        return _content(self.err)

    def processes(self) -> list[psutil.Process]:
        """All its living processes, the command's own included, orphans too."""
        return processes.marked(self.mark)

    def wait(self, *, timeout: float) -> int:
        """Return its exit status. Fails the test, with what was printed, if it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            alive = "\n".join(map(processes.describe, self.processes()))
            message = f"still running after {timeout} s:\n{alive}\n{self.printed()}"
            raise AssertionError(message) from None

    def wait_for_output(self, text: str, *, timeout: float) -> None:
        """Return once it has printed `text`, on either stream. Fails the test if it ends or takes longer."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout() + self.stderr():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"ran {timeout} s"
                raise AssertionError(f"{why} without printing {text!r}\n{self.printed()}")
            time.sleep(0.02)

    def assert_all_gone(self, *, within_s: float = LINGER_S) -> None:
        """No process of the command is left, whoever its parent is. Fails the test otherwise."""
        left = processes.settle(self.processes, within_s=within_s)
        if left:
            raise AssertionError("left behind:\n" + "\n".join(map(processes.describe, left)) + "\n" + self.printed())

    def printed(self) -> str:
        return f"--- stdout\n{self.stdout()}\n--- stderr\n{self.stderr()}"


@contextmanager
def started_python(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[Started]:
    """Python with these arguments, running; see `started_program`."""
    with started_program(sys.executable, *arguments, cwd=cwd, env=env) as started:
        yield started


@contextmanager
def started_program(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[Started]:
    """A command, running, in its own session; at the end whatever is left of it is killed.

    cwd: by default the repository. env: added to the environment; the repository can be imported from any folder.
    """
    mark = processes.new_mark()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **(env or {}), processes.MARK: mark}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            cwd=cwd or ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            yield Started(process, mark=mark, out=out, err=err)
        finally:
            processes.kill_all(processes.marked(mark))
            process.wait()


@contextmanager
def started_framework(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """`python -m framework` with these arguments, running: for tests that interrupt or kill it."""
    with started_python("-m", "framework", *arguments, cwd=cwd, env=env) as started:
        yield started


def run_python(
    *arguments: str, cwd: Path | None = None, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, until it ends. Fails the test if it takes longer or leaves a process behind."""
    with started_python(*arguments, cwd=cwd, env=env) as started:
        status = started.wait(timeout=timeout)
        started.assert_all_gone()
        return subprocess.CompletedProcess(started.process.args, status, started.stdout(), started.stderr())


def run_framework(
    *arguments: str, cwd: Path | None = None, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m framework` with these arguments, until it ends. The exit status is the caller's to check.

    Fails the test if it takes longer than `timeout` seconds or leaves a process behind, whatever its parent.
    """
    return run_python("-m", "framework", *arguments, cwd=cwd, timeout=timeout, env=env)


def _content(file: IO[bytes]) -> str:
    # pread: the position is shared with the writer.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
