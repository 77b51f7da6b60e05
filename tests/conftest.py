"""Guards around every test, the real data, and a list of what was skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import guards

DATA_VARIABLE = "FRAMEWORK_TEST_DATA"


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a process, thread, file, process group or a changed setting behind fails."""
    with guards.no_leaks(owns_state="own_state" in request.fixturenames):
        yield


@pytest.fixture
def own_state() -> None:
    """For a test that seeds, or runs a whole training in this process: settings may change and are put back.

    Generators, torch's switches, environment variables, signal handlers, working directory. What it starts or opens
    still has to be gone.
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped and why: a skip is never silent."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} skipped")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"{report.nodeid}: {reason}")
