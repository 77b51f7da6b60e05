"""The command in processes that have torch already: ranks that start alone, as cheap as those of a fork server."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

from tests.helpers.rank_pool import PRELOAD

DEADLINE_S = 60.0


@final
@dataclass(frozen=True)
class Forked:
    """`python -m framework`, running. Its output is in files."""

    process: BaseProcess
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def stdout(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def stderr(self) -> str:
        return self.err.read_text() if self.err.exists() else ""

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Return its exit status. Fails the test if it takes longer."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running\n{self.stdout()}\n{self.stderr()}"
        return self.process.exitcode

    def wait_for_output(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.stdout():
            assert self.process.exitcode is None, f"ended\n{self.stdout()}\n{self.stderr()}"
            assert time.monotonic() < deadline, self.stdout() + self.stderr()
            time.sleep(0.02)


@contextmanager
def forked(*arguments: str, cwd: Path, env: Mapping[str, str], output: Path) -> Iterator[Forked]:
    """The command with these arguments and variables, in a child that is killed at the end if it still runs.

    output: a folder for what it prints, which no other command has.
    """
    output.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    # There is one fork server, which `RankPool` uses, too.
    context.set_forkserver_preload(PRELOAD)
    given = {**os.environ, **env}
    process = context.Process(target=_command, args=(arguments, given, str(cwd), str(output)))
    process.start()
    try:
        yield Forked(process, output / "out", output / "err")
    finally:
        process.kill()
        process.join()
        process.close()


def _command(arguments: tuple[str, ...], environment: Mapping[str, str], cwd: str, output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["framework", *arguments]
    from framework.__main__ import main

    sys.exit(main())
