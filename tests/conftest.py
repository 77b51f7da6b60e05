"""Guards around every test, the real data, and a list of what was skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import guards

if TYPE_CHECKING:
    from framework.launch.warm import WarmServer

DATA_VARIABLE = "FRAMEWORK_TEST_DATA"
SMALL_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a process, thread, file, process group or a changed setting behind fails."""
    with guards.no_leaks(owns_state="own_state" in request.fixturenames):
        yield


@pytest.fixture
def own_state() -> None:
    """For a test that seeds, or runs a whole training in this process: settings may change and are put back.

    Generators, torch's switches, environment variables, handlers of signals and logs, working directory.
    What it starts or opens still has to be gone.
    """


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real data files (MNIST), named by FRAMEWORK_TEST_DATA; without it the test is skipped."""
    value = os.environ.get(DATA_VARIABLE)
    if not value:
        pytest.skip(f"{DATA_VARIABLE} isn't set: real MNIST files not found")
    folder = Path(value).resolve()
    if not folder.is_dir():
        pytest.fail(f"{DATA_VARIABLE}={value} isn't a folder")
    return folder


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmServer]:
    """One fork server for all tests that only need ranks: loading torch costs seconds each time."""
    from framework.__main__ import PRELOAD
    from framework.launch.warm import WarmServer

    server = WarmServer.start(PRELOAD)
    yield server
    server.close()


@pytest.fixture
def train(warm: WarmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command in `tmp_path` with ranks of the session's fork server; gives the run directory.

    For what a run computes and leaves. How the command itself begins and ends is tested with `run_framework`.
    """
    from framework import cli

    def run(*overrides: str, status: int = 0) -> Path:
        monkeypatch.chdir(tmp_path)
        before = set(tmp_path.glob("outputs/*/*"))
        assert cli.main(["trainer.gpus=0", *overrides], warm=warm) == status
        named = {text.removeprefix("resume=") for text in overrides if text.startswith("resume=")}
        resumed = before if "auto" in named else set(map(Path, named))
        (run_dir,) = set(tmp_path.glob("outputs/*/*")) - before or resumed
        return run_dir

    return run


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory (folder), as root may make one; else the test is skipped."""
    mount = Path("/sys/fs/cgroup/memory")
    limit, name = ("memory.limit_in_bytes", "version 1") if mount.is_dir() else ("memory.max", "version 2")
    group = (mount if mount.is_dir() else mount.parent) / f"framework_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group ({name}) can be made here: {error.strerror}")
    try:
        try:
            (group / limit).write_text(str(SMALL_BYTES))
            for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (group / swap).exists():
                    (group / swap).write_text(str(SMALL_BYTES) if "memsw" in swap else "0")
        except OSError as error:
            pytest.skip(f"the memory of a control group ({name}) can't be limited here: {error.strerror}")
        yield group
    finally:
        group.rmdir()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped and why: a skip is never silent."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} skipped")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"{report.nodeid}: {reason}")
