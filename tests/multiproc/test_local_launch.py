"""The local launcher with real processes: what it starts, how it reports failures, and that nothing stays behind."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from framework.config.schema import InitMethod
from framework.errors import LaunchError, RunError
from framework.launch import in_place, local
from framework.launch.failure import Kind
from framework.launch.panel import render
from framework.launch.plan import LaunchPlan, Outcome
from framework.launch.report import main_stack
from framework.launch.warm import WarmServer
from framework.launch.watch import Limits
from framework.run_dir import RunDir, create_run_dir
from framework.topology import Topology
from tests.helpers import processes

pytestmark = pytest.mark.multiproc


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
        limits=Limits(init_timeout_s=60.0, timeout_s=60.0, late_after_s=1.0),
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
    text = render(outcome.failure)
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
    assert render(outcome.failure) == "optimizer.lr=lots isn't a number"


@pytest.mark.parametrize("_again", [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (1, 2))])
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
    assert cause in render(outcome.failure)
    assert json.loads(run_dir.failure_file.read_text())["first"]["rank"] == 1
    assert_idle(warm)


@pytest.mark.parametrize(
    ("how", "kind"), [("sleep", Kind.HUNG), pytest.param("SIGSTOP", Kind.STOPPED, marks=pytest.mark.exhaustive)]
)
def test_who_is_waited_for_in_vain_is_named_though_others_raise_first(
    launch: Callable[..., Outcome], run_dir: RunDir, warm: WarmServer, how: str, kind: Kind
) -> None:
    (run_dir.path / "how").write_text(how)
    outcome = launch("misbehave_in_a_collective", procs=3)
    assert outcome.failure is not None
    first = outcome.failure.first
    assert (first.rank, first.kind, first.phase, first.step) == (1, kind, "data", 5), outcome.failure
    assert first.waited_in == "backward"
    assert first.stacks is not None
    assert next(main_stack(first.stacks)).endswith("in _sleep" if how == "sleep" else "in _misbehave")
    assert {other.rank for other in outcome.failure.others} <= {0, 2}
    assert all(other.timed_out or other.lost_peer for other in outcome.failure.others)
    said = json.loads(run_dir.failure_file.read_text())
    assert (said["first"]["kind"], said["late"][0]["rank"], said["late"][0]["phase"]) == (kind.value, 1, "data")
    assert "Rank 1 of 3" in render(outcome.failure)
    assert_idle(warm)


def test_a_rank_that_does_not_come_to_the_meeting_is_named(launch: Callable[..., Outcome], run_dir: RunDir) -> None:
    (run_dir.path / "how").write_text("never comes")
    outcome = launch("misbehave_in_a_collective", procs=3)
    assert outcome.failure is not None
    first = outcome.failure.first
    assert (first.rank, first.kind, first.phase, first.step) == (1, Kind.HUNG, "starting", 0), outcome.failure
    assert first.waited_in == "meeting"
    assert next(main_stack(first.stacks or "")).endswith("in _sleep")


def test_the_watch_itself_ends_a_wait_that_the_backend_does_not(run_dir: RunDir, warm: WarmServer) -> None:
    """nccl's own time-out may come to nothing."""
    (run_dir.path / "how").write_text("sleep unnoticed")
    plan = make_plan("misbehave_in_a_collective", procs=3, run_dir=run_dir, warm=warm)
    outcome = local.launch(replace(plan, limits=Limits(init_timeout_s=60.0, timeout_s=0.5, late_after_s=60.0)))
    assert outcome.failure is not None
    first = outcome.failure.first
    assert (first.rank, first.kind, first.phase, first.step) == (1, Kind.HUNG, "data", 5)
    assert outcome.failure.others == ()
    assert set(outcome.failure.living) == {"0", "2"}
    assert any("all_reduce" in line for line in main_stack(outcome.failure.living["0"]))
    assert_idle(warm)


def test_a_rank_that_is_late_is_waited_for_and_told(
    launch: Callable[..., Outcome], run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    (run_dir.path / "how").write_text("late")
    outcome = launch("misbehave_in_a_collective", procs=3)
    assert outcome.failure is None
    (late,) = outcome.late
    assert (late["rank"], late["phase"], late["step"]) == (1, "data", 5)
    assert 1.0 < late["seconds"] < 3.0
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" (pid")[0].partition(" after")[0] for line in lines] == ["Rank 1", "Rank 1 has come"]
    assert "is late: the others have waited 1 s for it; it is in data after step 5" in lines[0]


def test_where_compiled_code_failed_is_told(launch: Callable[..., Outcome], run_dir: RunDir) -> None:
    (run_dir.path / "how").write_text("SIGSEGV")
    outcome = launch("misbehave_in_a_collective", procs=3)
    assert outcome.failure is not None
    first = outcome.failure.first
    assert (first.rank, first.cause, first.phase, first.step) == (1, "killed by SIGSEGV", "data", 5)
    assert next(main_stack(first.stacks or "")).endswith("in _misbehave")


def test_one_that_the_system_kills_for_want_of_memory_is_told_from_others(
    launch: Callable[..., Outcome], run_dir: RunDir, small_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a control group of its own, so that the kernel's log is the only account."""
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log can't be read here")
    monkeypatch.setenv("SMALL_GROUP", str(small_group))
    (run_dir.path / "how").write_text("out of memory")
    outcome = launch("misbehave_in_a_collective", procs=2)
    assert outcome.failure is not None
    first = outcome.failure.first
    assert (first.rank, first.cause) == (1, "killed by SIGKILL: the system was out of memory")


def test_leaving_early_with_status_0_is_a_failure(launch: Callable[..., Outcome], warm: WarmServer) -> None:
    outcome = launch("leave_alone", procs=2)
    assert outcome.status == 1
    assert outcome.failure is not None
    assert (outcome.failure.first.rank, outcome.failure.others) == (1, ())
    assert "left early with exit status 0" in render(outcome.failure)
    assert_idle(warm)


def test_an_exception_without_words_is_reported(launch: Callable[..., Outcome]) -> None:
    outcome = launch("raise_unspeakable", procs=1)
    assert outcome.failure is not None
    assert outcome.failure.first.cause == "UnspeakableError: (its message can't be shown: __str__ raised RuntimeError)"


def test_the_end_of_a_process_that_a_rank_forked_is_not_the_ranks(
    launch: Callable[..., Outcome], run_dir: RunDir
) -> None:
    assert launch("fork_a_process", procs=1).status == 0
    assert (run_dir.path / "forked").exists()


def test_a_failure_that_can_not_be_saved_is_reported(launch: Callable[..., Outcome], run_dir: RunDir) -> None:
    run_dir.failure_file.mkdir()  # refuses to be replaced by a file, as a full disk does
    outcome = launch("rank_1_raises", procs=2)
    assert outcome.failure is not None
    text = render(outcome.failure)
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
    numbers = (signal.SIGHUP, signal.SIGUSR2) if ignored else (signal.SIGHUP,)
    waker = threading.Thread(target=_signals_once_waiting, args=(run_dir, *numbers))
    beyond = signal.signal(signal.SIGUSR2, _raise_beyond)
    try:
        waker.start()
        with pytest.raises(BeyondError if ignored else KeyboardInterrupt):
            local.launch(plan)
        waker.join()
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGUSR2, beyond)
    assert_idle(warm)


def test_a_rank_that_ignores_sigterm_is_ended_all_the_same(launch: Callable[..., Outcome], warm: WarmServer) -> None:
    before = time.monotonic()
    outcome = launch("rank_0_raises_rank_1_ignores_sigterm", procs=2)
    assert time.monotonic() - before < 5.0
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


@pytest.mark.exhaustive
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
