"""The local launcher with real processes: what it starts, how it reports failures, and that nothing stays behind."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from framework.config.schema import InitMethod
from framework.errors import LaunchError, RunError
from framework.launch import in_place, local
from framework.launch.plan import LaunchPlan, Outcome
from framework.launch.warm import WarmServer
from framework.run_dir import RunDir, create_run_dir
from framework.topology import Topology
from tests.helpers import processes

pytestmark = pytest.mark.multiproc
GRACE_S = 2.0


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path / "launch")


@pytest.fixture
def launch(warm: WarmServer, run_dir: RunDir) -> Callable[..., Outcome]:
    def call(entry: str, *, procs: int, method: InitMethod = InitMethod.ENV) -> Outcome:
        return local.launch(make_plan(entry, procs=procs, run_dir=run_dir, warm=warm, method=method))

    return call


def make_plan(
    entry: str, *, procs: int, run_dir: RunDir, warm: WarmServer | None, method: InitMethod = InitMethod.ENV
) -> LaunchPlan:
    return LaunchPlan(
        entry=f"tests.multiproc.entries:{entry}",
        run_dir=run_dir,
        topology=Topology(nnodes=1, procs_per_node=procs, gpus_per_node=0, span=1),
        init_method=method,
        start_timeout_s=60.0,
        grace_s=GRACE_S,
        terminal=True,
        warm=warm,
    )


def living_children_of(server: WarmServer) -> list[psutil.Process]:
    pid = server._process.pid
    return [p for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def assert_idle(server: WarmServer) -> None:
    """Only the server itself is left: the keeper leaves on its own once the launcher lets go of it."""
    assert processes.settle(lambda: living_children_of(server), within_s=3.0) == []


def test_every_rank_runs_and_has_its_log(launch: Callable[..., Outcome], run_dir: RunDir, warm: WarmServer) -> None:
    assert launch("say_hello", procs=3).status == 0
    for rank in range(3):
        assert f"hello from rank {rank} at env://" in run_dir.rank_log(rank).read_text()
    assert_idle(warm)


@pytest.mark.parametrize("method", list(InitMethod))
def test_ranks_meet_by_every_init_method(
    launch: Callable[..., Outcome], run_dir: RunDir, warm: WarmServer, method: InitMethod
) -> None:
    assert launch("add_up", procs=2, method=method).status == 0
    assert [(run_dir.path / f"total_{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]
    assert_idle(warm)


def test_a_rank_that_raises_ends_the_run_at_once(
    launch: Callable[..., Outcome], run_dir: RunDir, warm: WarmServer
) -> None:
    before = time.monotonic()
    outcome = launch("rank_1_raises", procs=3)
    assert time.monotonic() - before < 5.0
    assert outcome.status == 1
    assert outcome.failure is not None
    assert outcome.failure.first.rank == 1
    text = outcome.failure.render()
    assert text.startswith("Traceback")
    assert (
        text.count("ValueError: the sky is falling") == 2
    )  # the traceback's last line, and the line that names the rank
    assert "Rank 1 of 3" in text
    assert "Traceback" in run_dir.rank_log(1).read_text()
    assert "the sky is falling" in run_dir.failure_file.read_text()
    assert_idle(warm)


def test_a_refusal_by_all_ranks_is_one_message_with_its_own_status(launch: Callable[..., Outcome]) -> None:
    outcome = launch("all_refuse", procs=2)
    assert outcome.status == 2
    assert outcome.failure is not None
    assert outcome.failure.render() == "optimizer.lr=lots isn't a number"


@pytest.mark.parametrize("_again", range(3))
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "killed by SIGKILL"),
        ("_exit", "left early with exit status 0"),
        ("exit", "SystemExit: 0"),
        ("raise", "ValueError: a mistake of its own"),
    ],
)
def test_the_rank_that_left_its_peers_in_a_collective_is_named_first(
    launch: Callable[..., Outcome], run_dir: RunDir, warm: WarmServer, how: str, cause: str, _again: int
) -> None:
    (run_dir.path / "how").write_text(how)
    outcome = launch("leave_the_others", procs=4)
    assert outcome.status == 1
    assert outcome.failure is not None
    assert outcome.failure.first.rank == 1, outcome.failure
    assert cause in outcome.failure.render()
    assert json.loads(run_dir.failure_file.read_text())["first"]["rank"] == 1
    assert_idle(warm)


def test_leaving_early_with_status_0_is_a_failure(launch: Callable[..., Outcome], warm: WarmServer) -> None:
    outcome = launch("leave_alone", procs=2)
    assert outcome.status == 1
    assert outcome.failure is not None
    assert (outcome.failure.first.rank, outcome.failure.others) == (1, ())
    assert "left early with exit status 0" in outcome.failure.render()
    assert_idle(warm)


def test_an_exception_without_words_is_reported(launch: Callable[..., Outcome]) -> None:
    outcome = launch("raise_unspeakable", procs=1)
    assert outcome.failure is not None
    assert "UnspeakableError: (its message can't be shown: __str__ raised RuntimeError)" in outcome.failure.render()


def test_the_end_of_a_process_that_a_rank_forked_is_not_the_ranks(
    launch: Callable[..., Outcome], run_dir: RunDir
) -> None:
    assert launch("fork_a_process", procs=1).status == 0
    assert (run_dir.path / "forked").exists()


def test_a_failure_that_can_not_be_saved_is_reported(launch: Callable[..., Outcome], run_dir: RunDir) -> None:
    run_dir.failure_file.mkdir()  # refuses to be replaced by a file, as a full disk does
    outcome = launch("rank_1_raises", procs=2)
    assert outcome.failure is not None
    text = outcome.failure.render()
    assert "ValueError: the sky is falling" in text
    assert text.splitlines()[-1].startswith(f"{run_dir.failure_file} can't be written: ")


@pytest.mark.parametrize(("entry", "shown"), [("rank_1_raises", True), ("say_hello", False)])
def test_the_cursor_is_shown_after_ranks_were_ended_early(
    launch: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, entry: str, shown: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    launch(entry, procs=2)
    assert ("\x1b[?25h" in terminal.getvalue()) is shown


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("ignored", [True, False])
def test_a_signal_that_is_ignored_stays_so(warm: WarmServer, run_dir: RunDir, ignored: bool) -> None:
    """`nohup` has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    plan = make_plan("wait_long", procs=2, run_dir=run_dir, warm=warm)
    numbers = (signal.SIGHUP, signal.SIGUSR1) if ignored else (signal.SIGHUP,)
    waker = threading.Thread(target=_signals_once_waiting, args=(run_dir, *numbers))
    beyond = signal.signal(signal.SIGUSR1, _raise_beyond)
    try:
        waker.start()
        with pytest.raises(BeyondError if ignored else KeyboardInterrupt):
            local.launch(plan)
        waker.join()
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGUSR1, beyond)
    assert_idle(warm)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(
    launch: Callable[..., Outcome], warm: WarmServer
) -> None:
    before = time.monotonic()
    outcome = launch("rank_0_raises_rank_1_ignores_sigterm", procs=2)
    assert GRACE_S <= time.monotonic() - before < GRACE_S + 5.0
    assert outcome.failure is not None
    assert outcome.failure.first.rank == 0
    assert_idle(warm)


def test_ranks_get_torchruns_variables_and_the_parents_present_environment(
    launch: Callable[..., Outcome], run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIVEN", "after the server was started")
    monkeypatch.chdir(tmp_path)
    assert launch("show_environment", procs=2).status == 0
    lines = (run_dir.path / "environment_1").read_text().splitlines()
    assert lines[:5] == ["RANK=1", "LOCAL_RANK=1", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"]
    assert lines[6:] == ["GIVEN=after the server was started", "GONE=None", f"cwd={tmp_path}"]


def test_what_other_ranks_print_goes_to_their_log_alone(
    launch: Callable[..., Outcome], run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("write_everywhere", procs=2).status == 0
    log = run_dir.rank_log(1).read_text()
    assert {"printed", "complained", "from a descriptor"} <= set(log.splitlines())
    assert {"printed", "complained"} <= set(run_dir.rank_log(0).read_text().splitlines())


def test_an_interrupt_ends_every_rank(warm: WarmServer, run_dir: RunDir) -> None:
    plan = make_plan("wait_long", procs=2, run_dir=run_dir, warm=warm)
    waker = threading.Thread(target=_interrupt_once_waiting, args=(run_dir, 2))
    waker.start()
    with pytest.raises(KeyboardInterrupt):
        local.launch(plan)
    waker.join()
    assert_idle(warm)


def test_the_end_of_the_keeper_ends_the_run(warm: WarmServer, run_dir: RunDir) -> None:
    plan = make_plan("wait_long", procs=2, run_dir=run_dir, warm=warm)
    waker = threading.Thread(target=_kill_first_child, args=(run_dir, warm))
    waker.start()
    with pytest.raises(LaunchError, match="keeper"):
        local.launch(plan)
    waker.join()
    assert_idle(warm)


def test_the_end_of_the_fork_server_ends_the_ranks(run_dir: RunDir) -> None:
    server = WarmServer.start(["torch", "torch.distributed"])
    try:
        plan = make_plan("wait_long", procs=2, run_dir=run_dir, warm=server)
        ranks: list[psutil.Process] = []
        waker = threading.Thread(target=_kill_server, args=(run_dir, server, ranks))
        waker.start()
        with pytest.raises(LaunchError, match="fork server"):
            local.launch(plan)
        waker.join()
        assert len(ranks) == 3
        assert processes.settle(lambda: [p for p in ranks if p.is_running()], within_s=3.0) == []
    finally:
        server.close()


def test_in_place_runs_in_this_process_and_lets_errors_pass(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = in_place.launch(make_plan("say_hello", procs=1, run_dir=run_dir, warm=None))
    assert outcome.status == 0
    assert "hello from rank 0 at None" in capsys.readouterr().out


def test_leaving_early_in_place_is_a_failure(run_dir: RunDir) -> None:
    with pytest.raises(RunError, match=r"SystemExit\(0\) was raised at .*entries.py:\d+"):
        in_place.launch(make_plan("exit_at_once", procs=1, run_dir=run_dir, warm=None))


def test_local_without_a_server_starts_its_own(run_dir: RunDir) -> None:
    assert local.launch(make_plan("say_hello", procs=2, run_dir=run_dir, warm=None)).status == 0
    assert "hello from rank 1" in run_dir.rank_log(1).read_text()


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b"])
def test_ranks_meet_by_file_wherever_the_run_directory_is(tmp_path: Path, warm: WarmServer, name: str) -> None:
    for _ in range(2):
        run_dir = create_run_dir(tmp_path / name)
        plan = make_plan("add_up", procs=2, run_dir=run_dir, warm=warm, method=InitMethod.FILE)
        assert local.launch(plan).status == 0
        assert (run_dir.path / "total_0").read_text() == "3.0"
    assert [path.name for path in tmp_path.iterdir()] == [name]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class BeyondError(Exception):
    """Raised by the signal that comes after the one a test is about."""


def _raise_beyond(_signal: int, _frame: object) -> None:
    raise BeyondError


def _signals_once_waiting(run_dir: RunDir, *numbers: signal.Signals) -> None:
    _wait_until_waiting(run_dir, 2)
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.2)


def _wait_until_waiting(run_dir: RunDir, procs: int) -> None:
    deadline = time.monotonic() + 60.0
    while not all((run_dir.path / f"waiting_{rank}").exists() for rank in range(procs)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _interrupt_once_waiting(run_dir: RunDir, procs: int) -> None:
    _wait_until_waiting(run_dir, procs)
    os.kill(os.getpid(), signal.SIGINT)


def _kill_first_child(run_dir: RunDir, server: WarmServer) -> None:
    """The keeper is the oldest of the server's children."""
    _wait_until_waiting(run_dir, 2)
    min(living_children_of(server), key=lambda process: (process.create_time(), process.pid)).kill()


def _kill_server(run_dir: RunDir, server: WarmServer, ranks: list[psutil.Process]) -> None:
    _wait_until_waiting(run_dir, 2)
    ranks += living_children_of(server)
    os.kill(server._process.pid, signal.SIGKILL)
