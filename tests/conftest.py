"""Guards around every test, the real data, and a list of what was skipped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from framework.errors import EXIT_WRONG_REQUEST
from tests.helpers import guards
from tests.helpers.rank_pool import RankPool
from tests.helpers.trust import trusting

if TYPE_CHECKING:
    from tests.helpers.internals import ForkServer
    from tests.helpers.s3 import S3

DATA_VARIABLE = "FRAMEWORK_TEST_DATA"


# How long an example takes depends on the machine's load.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

# Tests run beside each other. Read when torch is loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing is downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests that are marked `exhaustive`, too")


class FailureLines:
    """Prints `FAILED tests/...::... - ...` when a test fails: a run that is ended at its limit prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        # The workers of xdist have no terminal; their reports come here again in the process that started them.
        if not report.failed or reporter is None:
            return
        word = "FAILED" if report.when == "call" else "ERROR"
        crash = getattr(report.longrepr, "reprcrash", None)
        first_line = crash.message.partition("\n")[0] if crash else ""
        reporter.ensure_newline()
        if self._config.get_terminal_writer().width_of_current_line > 0:
            # After the letters of tests that ran in workers.
            reporter.write_line("")
        reporter.write_line(f"{word} {report.nodeid} - {first_line}".removesuffix(" - "), red=True)
        reporter.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Name failed tests at once, and handle signals as usual.

    A shell or nohup that starts pytest in the background has signals ignored.
    """
    config.pluginmanager.register(FailureLines(config))
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


# Select before -k and -m do.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked `exhaustive`, unless asked for by option, by `-m` or by their own name."""
    if config.option.exhaustive or "exhaustive" in config.option.markexpr:
        return
    named = [argument.partition("::")[2] for argument in config.args if "::" in argument]

    def is_named(item: pytest.Item) -> bool:
        name = item.nodeid.partition("::")[2]
        return any(name == each or name.startswith((f"{each}[", f"{each}::")) for each in named)

    left_out = [item for item in items if item.get_closest_marker("exhaustive") and not is_named(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, file, process group or a changed setting behind."""
    with guards.no_leaks(owns_state="own_state" in request.fixturenames):
        yield


@pytest.fixture
def own_state() -> None:
    """For a test that seeds, or runs a whole training in this process: settings may change and are put back.

    Generators, torch's switches, environment variables, handlers of signals and logs, working directory.
    What it starts or opens still has to be gone.
    """


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real data files (MNIST) of FRAMEWORK_TEST_DATA; without that the test is skipped.

    The files are links, so that what is made beside them isn't made where they are.
    """
    value = os.environ.get(DATA_VARIABLE)
    if not value:
        pytest.skip(f"{DATA_VARIABLE} isn't set: real MNIST files not found")
    folder = Path(value).resolve()
    if not folder.is_dir():
        pytest.fail(f"{DATA_VARIABLE}={value} isn't a folder")
    root = tmp_path_factory.mktemp("data")
    for file in filter(Path.is_file, folder.rglob("*")):
        link = root / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return root


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """One fork server for all tests that only need ranks: loading torch costs seconds each time."""
    from tests.helpers.internals import PRELOAD, SLOW_TO_IMPORT, OwnForkServer, call_in_child

    # recipe=digits, the default, has its data from scikit-learn: 1.3 s in each rank.
    server = OwnForkServer((*PRELOAD, *SLOW_TO_IMPORT, "sklearn.datasets", "sklearn.preprocessing"))
    # No test's own deadlines run while it imports.
    server.load(())
    call_in_child(server, "builtins:dict", {}, timeout_s=100.0)
    yield server
    server.close()


@pytest.fixture(scope="session")
def s3_for_all() -> Iterator[S3]:
    """One S3 server for all tests: moto takes seconds to load."""
    from tests.helpers.s3 import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_for_all: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An S3 server, which this process and those that it starts use. Its faults end with the test."""
    import fsspec

    for name, value in s3_for_all.env.items():
        monkeypatch.setenv(name, value)
    # As in a new process, where credentials are looked up.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield s3_for_all
    s3_for_all.set_fault(count=0)


def run_dirs(folder: Path) -> set[Path]:
    """Return the directories of all runs in a folder, also of those that have only started."""
    # wandb keeps folders of logs, too.
    return {logs.parent for logs in folder.glob("outputs/**/logs") if "wandb" not in logs.parts}


@pytest.fixture
def train(
    request: pytest.FixtureRequest, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Run the command in `tmp_path` with ranks of the session's fork server; return the run directory.

    For what a run computes and leaves. How the command itself begins and ends is tested with `run_framework`. A file of
    tests whose runs import a slow library names it in PRELOADED.
    """
    from tests.helpers.internals import compose

    fork_server.load(getattr(request.module, "PRELOADED", ()))

    def run(*overrides: str, status: int = 0) -> Path:
        monkeypatch.chdir(tmp_path)
        before = run_dirs(tmp_path)
        records = {}
        for folder in before:
            records.update({file: file.read_text() for file in folder.glob("*.json")})
        assert compose.main(["trainer.gpus=0", *trusting(overrides)], fork_server=fork_server) == status
        named = {text.removeprefix("resume=") for text in overrides if text.startswith("resume=")}
        resumed = before if "auto" in named else set(map(Path, named))
        if status == EXIT_WRONG_REQUEST:
            for folder in run_dirs(tmp_path) - before:
                step = json.loads((folder / "failure.json").read_text())["first"]["step"]
                assert step, "a request that is refused before the first step leaves nothing"
            for file, content in records.items():
                assert file.read_text() == content, "a refused resume leaves the run's records as they were"
            return next(iter(resumed), tmp_path)
        (run_dir,) = run_dirs(tmp_path) - before or resumed
        return run_dir

    return run


@pytest.fixture(scope="session")
def shared_run(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a run with these overrides, made once for all tests that ask for it: copy it to change it."""
    from tests.helpers.internals import compose

    made: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str, status: int = 0) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("shared")
            with guards.no_leaks(owns_state=True), pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                assert compose.main(["trainer.gpus=0", *overrides], fork_server=fork_server) == status
            (made[overrides],) = run_dirs(folder)
        return made[overrides]

    return run


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """CPU ranks with a live process group, for what needs ranks but not their start: see `RankPool.run`."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped and why: a skip is never silent."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} skipped")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"{report.nodeid}: {reason}")
