from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.launch.failure import Kind, RankFailure
from framework.launch.report import FailureReport, main_stack, make_report
from framework.pulse import Phase
from tests.unit.launch.statements import LOST_PEER, WAITED_IN_VAIN, end, record, standing, statement, told


def report_of(*ranks: dict[str, Any], **how: Any) -> FailureReport:
    return make_report([statement(*ranks)], world_size=len(ranks), **how)


def order(report: FailureReport) -> list[int]:
    return [failure.rank for failure in (report.first, *report.others)]


@pytest.mark.parametrize(
    ("status", "oom", "cause"),
    [
        (-signal.SIGSEGV, False, "killed by SIGSEGV"),
        (-signal.SIGKILL, False, "killed by SIGKILL"),
        (-signal.SIGKILL, True, "killed by SIGKILL: the system was out of memory"),
        (-signal.SIGTERM, False, "killed by SIGTERM"),
        (0, False, "left early with exit status 0, before its work was done"),
        (1, False, "left with exit status 1 without saying why"),
        (77, False, "left with exit status 77 without saying why"),
        (None, False, "its process is gone: killed, or left without a word"),
        (None, True, "its process is gone: killed, or left without a word; the system was out of memory"),
    ],
)
def test_a_silent_end_is_told_by_its_status(status: int | None, oom: bool, cause: str) -> None:
    report = report_of(told(0), told(1, exit=end(time=1.0, status=status, early=status == 0), oom=oom))
    assert report.first.rank == 1
    assert report.first.cause == cause
    assert report.first.exit_status == 1
    assert report.others == ()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Segmentation fault", "SIGSEGV"),
        ("Bus error", "SIGBUS"),
        ("Aborted", "SIGABRT"),
        ("Floating point exception", "SIGFPE"),
        ("Floating-point exception", "SIGFPE"),
        ("Illegal instruction", "SIGILL"),
        ("init_sys_streams: no", None),
    ],
)
def test_where_nobody_saw_the_end_its_stack_tells_the_signal(words: str, name: str | None) -> None:
    stacks = f'Fatal Python error: {words}\n\nCurrent thread 0x1 (most recent call first):\n  File "a", line 1 in f\n'
    first = report_of(told(0), told(1, exit=end(time=1.0, status=None), stacks=stacks)).first
    assert (first.kind, first.signal) == (Kind.EXIT if name is None else Kind.SIGNAL, name)
    assert (first.status, first.stacks) == (None, stacks)
    said = report_of(told(0), told(1, exit=end(time=1.0, status=3), stacks=stacks)).first
    assert (said.kind, said.signal) == (Kind.EXIT, None)


def test_any_signal_can_be_reported() -> None:
    """Real-time signals have numbers without a name."""
    number = signal.SIGRTMIN + 3
    assert str(int(number)) in report_of(told(0, exit=end(time=1.0, status=-number))).first.cause


def test_where_a_rank_was_is_told() -> None:
    at = standing(5, phase=Phase.CHECKPOINT, step=31, alive=False)
    failed = told(at, exit=end(time=8.0, status=-11), devices="GPU 1", local_rank=1, stacks="Fatal Python error: x")
    report = make_report([statement(told(0)), statement(failed, node=1)], world_size=8, attempt=2)
    assert report.attempt == 2
    assert report.first == RankFailure(
        rank=5,
        kind=Kind.SIGNAL,
        node=1,
        host="host1",
        local_rank=1,
        pid=1005,
        devices="GPU 1",
        phase="checkpoint",
        step=31,
        time=8.0,
        log="logs/rank_5.log",
        status=-11,
        signal="SIGSEGV",
        stacks="Fatal Python error: x",
    )


def test_one_that_ended_before_it_said_which_process_it_was_has_the_pid_that_ended() -> None:
    at = standing(1, pid=0, alive=False, phase=Phase.STARTING)
    assert report_of(told(0), told(at, exit={**end(time=1.0, status=-9), "pid": 77})).first.pid == 77


def test_first_is_who_failed_first_not_who_was_heard_first() -> None:
    report = report_of(
        told(0, record=record(time=9.0, error=LOST_PEER), exit=end(time=9.1, status=1)),
        told(1),
        told(2, exit=end(time=8.0, status=-9)),
        told(3, record=record(time=7.0, error="KeyError: 'x'"), exit=end(time=7.1, status=1)),
    )
    assert order(report) == [3, 2, 0]


def test_a_rank_that_raised_counts_from_then_however_long_it_took_to_leave() -> None:
    report = report_of(
        told(0, record=record(time=5.0), exit=end(time=30.0, status=1)), told(1, exit=end(time=6.0, status=-11))
    )
    assert (report.first.rank, report.first.status) == (0, 1)


def test_a_rank_that_raised_and_has_not_left_yet_is_in_the_report() -> None:
    report = report_of(told(0, exit=end(time=3.0, status=1)), told(1, record=record(time=2.0)))
    assert (report.first.rank, report.first.status, report.first.cause) == (1, None, "ValueError: no")


def test_at_the_same_time_the_lower_rank_is_named() -> None:
    ranks = [told(rank, exit=end(time=1.0, status=1)) for rank in (2, 1, 3)]
    assert order(report_of(*ranks)) == [1, 2, 3]


@pytest.mark.parametrize("status", [0, 75])
def test_who_ended_well_is_not_in_the_report(status: int) -> None:
    """75: it has stopped on request, with a checkpoint."""
    report = report_of(told(0, exit=end(time=0.5, status=status)), told(1, exit=end(time=1.0, status=-6)))
    assert order(report) == [1]


LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:81",
    "RuntimeError: [pair.cc:547] Read error [127.0.0.1]:9: Connection reset by peer",
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//0",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
)


@pytest.mark.parametrize("error", LOST)
@pytest.mark.parametrize(("status", "early"), [(-9, False), (0, True), (3, False)])
def test_a_silent_end_comes_before_the_errors_of_those_it_left(error: str, status: int, early: bool) -> None:
    report = report_of(
        told(0, record=record(time=5.0, error=error), exit=end(time=5.2, status=1)),
        told(1),
        told(2, exit=end(time=5.5, status=status, early=early)),
        told(3, record=record(time=5.1, error=error)),
    )
    assert order(report) == [2, 0, 3]


def test_a_silent_end_long_after_an_error_is_not_its_cause() -> None:
    report = report_of(told(0, record=record(time=5.0, error=LOST_PEER)), told(2, exit=end(time=50.0, status=-9)))
    assert report.first.rank == 0


def test_a_silent_end_does_not_come_before_an_error_of_a_ranks_own() -> None:
    report = report_of(told(0, record=record(time=5.0)), told(2, exit=end(time=5.5, status=-9)))
    assert report.first.rank == 0


def test_an_error_of_its_own_comes_before_the_loss_of_a_peer_whatever_another_nodes_clock_says() -> None:
    lost = statement(told(0, record=record(time=5.0, error=LOST_PEER)))
    own = statement(told(1, record=record(time=6.5)), node=1)
    assert order(make_report([lost, own], world_size=2)) == [1, 0]


def test_what_was_wrapped_around_the_loss_of_a_peer_is_recognised() -> None:
    said = record(time=5.0, error="MyError: training failed", of_peers=LOST_PEER)
    assert report_of(told(0, record=said), told(2, exit=end(time=5.5, status=-9))).first.rank == 2


def test_the_living_rank_that_others_waited_for_in_vain_is_first() -> None:
    at = standing(1, collectives=19, phase=Phase.DATA)
    report = report_of(
        told(standing(0, still_s=31.0), record=record(time=5.0, error=WAITED_IN_VAIN)),
        told(at, stacks="its stacks"),
        told(standing(2, still_s=30.0), stacks="another's"),
    )
    assert order(report) == [1, 0]
    assert (report.first.kind, report.first.phase, report.first.stacks) == (Kind.HUNG, "data", "its stacks")
    assert report.first.cause == "hung; the others waited 30 s in backward"
    assert report.living == {"2": "another's"}


def test_a_stopped_rank_is_told_from_a_hung_one() -> None:
    report = report_of(told(standing(0, stopped=True)), told(1, record=record(time=5.0, error=WAITED_IN_VAIN)))
    assert (report.first.rank, report.first.kind) == (0, Kind.STOPPED)
    assert report.first.cause.startswith("was stopped (SIGSTOP); the others waited")


def test_one_that_failed_by_itself_is_not_said_to_hang_while_it_is_leaving() -> None:
    error = "torch.distributed.DistStoreError: wait timeout after 30000ms, keys: /mine"
    report = report_of(told(0), told(standing(1, collectives=19), record=record(time=5.0, error=error)))
    assert order(report) == [1]
    assert report.first.kind is Kind.EXCEPTION


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: the feature database: timed out waiting for an answer",
        "ConnectionError: the feature database: connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_an_error_that_sounds_like_the_loss_of_a_peer_is_a_ranks_own(error: str) -> None:
    """And so are the lines of source code in its traceback."""
    said = record(time=5.0, error=error, traceback=f"    raise {LOST_PEER}\n{error}")
    report = report_of(
        told(0, record=said),
        told(standing(1, collectives=19, phase=Phase.DATA), stacks="asleep"),
        told(2, record=record(time=4.0, error=LOST_PEER)),
    )
    assert order(report) == [0, 2]
    assert (report.first.kind, report.first.lost_peer, report.first.timed_out) == (Kind.EXCEPTION, False, False)


SAID_NOTHING = "torch.distributed.DistBackendError: NCCL timed out waiting"


@pytest.mark.parametrize(
    ("error", "still_s", "hung"),
    [
        (SAID_NOTHING, 9.0, False),
        (SAID_NOTHING, 11.0, True),
        (WAITED_IN_VAIN, 0.9, False),
        (WAITED_IN_VAIN, 1.1, True),
        ("torch.distributed.DistNetworkError: Timed out after 4 seconds waiting for clients", 1.9, False),
        ("torch.distributed.DistNetworkError: Timed out after 4 seconds waiting for clients", 2.1, True),
        ("torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /mine", 11.0, True),
    ],
)
def test_nobody_hung_whom_others_had_not_waited_for(error: str, still_s: float, hung: bool) -> None:
    """For half of the time-out: the one that the error tells, or that of the run, here 20 s."""
    report = report_of(
        told(standing(0, still_s=still_s), record=record(time=5.0, error=error)),
        told(standing(1, collectives=19, still_s=50.0)),
        told(standing(2, alive=False, collectives=18, still_s=60.0)),
    )
    assert order(report) == ([1, 0] if hung else [0])


def test_one_that_came_when_the_others_had_gone_is_who_they_waited_for() -> None:
    report = report_of(
        told(
            standing(0, alive=False, still_s=2.5),
            record=record(time=5.0, error=WAITED_IN_VAIN),
            exit=end(time=5.1, status=1),
        ),
        told(standing(1, collectives=19), record=record(time=5.2, error=LOST_PEER)),
    )
    assert order(report) == [1, 0]
    assert report.first.kind is Kind.HUNG


def test_a_hung_rank_of_another_node_is_found() -> None:
    waiting = statement(told(standing(0, still_s=2.0), record=record(time=5.0, error=WAITED_IN_VAIN)))
    hung = statement(told(standing(1, collectives=19)), node=1)
    report = make_report([waiting, hung], world_size=2)
    assert (report.first.rank, report.first.node, report.first.host) == (1, 1, "host1")


def unreachable(node: int) -> RankFailure:
    at = {"rank": 2 * node, "local_rank": 0, "pid": 0, "devices": "", "phase": "unknown", "step": 0, "log": "log"}
    return RankFailure(kind=Kind.UNREACHABLE, node=node, host="", time=9.0, waited_s=7.0, **at)  # type: ignore[arg-type]


def test_a_node_that_is_silent_is_first_where_its_ranks_were_waited_for() -> None:
    lost = told(0, record=record(time=5.0, error=LOST_PEER))
    assert report_of(lost, silent_nodes=[unreachable(1)]).first.kind is Kind.UNREACHABLE
    assert report_of(told(0), silent_nodes=[unreachable(1)]).first.kind is Kind.UNREACHABLE
    own = report_of(told(0, record=record(time=5.0)), silent_nodes=[unreachable(1)])
    assert [failure.kind for failure in (own.first, *own.others)] == [Kind.EXCEPTION, Kind.UNREACHABLE]


def test_one_that_came_just_as_the_report_was_made_is_named() -> None:
    late = [{"rank": 1, "phase": "data", "step": 3, "seconds": 65.0}, {"rank": 0, "phase": "data", "seconds": 2.0}]
    report = make_report([statement(told(0), told(1), late=late)], world_size=2)
    assert (report.first.rank, report.first.kind, report.first.phase) == (1, Kind.HUNG, "data")
    assert report.first.cause == "hung; the others waited 65 s"
    assert report_of(told(0), told(standing(1, step=6))).first.rank == 1


def test_who_was_late_before_is_told() -> None:
    late = {"rank": 1, "phase": "data", "step": 3, "seconds": 12.0}
    failed = told(0, record=record(time=5.0))
    assert make_report([statement(failed, told(1), late=[late])], world_size=2).late == [late]


@given(st.integers(2, 6), st.data())
def test_whoever_hangs_is_first_whatever_becomes_of_those_that_wait(size: int, data: st.DataObject) -> None:
    hung = data.draw(st.integers(0, size - 1))
    phase = data.draw(st.sampled_from([phase for phase in Phase if phase > Phase.MEETING]))
    at = standing(hung, collectives=19, phase=phase, stopped=data.draw(st.booleans()))
    fates = st.sampled_from(["waits", "raised", "left", "lost"])
    ranks = [told(at)]
    for rank in set(range(size)) - {hung}:
        fate = data.draw(fates) if rank != (hung + 1) % size else "raised"
        time = data.draw(st.floats(50, 60))
        said = record(time=time, error=LOST_PEER if fate == "lost" else WAITED_IN_VAIN)
        ranks.append(
            told(
                standing(rank, alive=fate != "left", still_s=data.draw(st.floats(1.5, 40))),
                record=None if fate == "waits" else said,
                exit=end(time=time + 0.1, status=1) if fate == "left" else None,
            )
        )
    report = report_of(*data.draw(st.permutations(ranks)))
    assert report.first.rank == hung
    assert report.first.kind is (Kind.STOPPED if at.stopped else Kind.HUNG)


@given(st.integers(2, 6), st.data())
def test_whoever_dies_is_first_in_any_order_of_arrival(size: int, data: st.DataObject) -> None:
    dead = data.draw(st.integers(0, size - 1))
    seen = st.floats(100, 104)  # the end of a process is seen when it is, and nodes' clocks differ
    status = data.draw(st.sampled_from([-9, -11, 3, 0]))
    raised = data.draw(st.booleans())
    ranks = [
        told(
            rank,
            record=record(time=data.draw(seen), error=data.draw(st.sampled_from(LOST)) if rank != dead else "KeyError")
            if raised or rank != dead
            else None,
            exit=end(time=data.draw(seen), status=status if rank == dead else 1, early=status == 0),
        )
        for rank in range(size)
    ]
    cut = data.draw(st.integers(0, size))
    statements = [statement(*ranks[:cut]), statement(*ranks[cut:], node=1)]
    report = make_report(data.draw(st.permutations(statements)), world_size=size)
    assert report.first.rank == dead
    assert len(report.others) == size - 1


ends = st.none() | st.builds(
    lambda status, time: end(time=time, status=status), st.sampled_from([0, 1, -9, 75, None]), st.floats(0, 20)
)
records = st.none() | st.builds(
    lambda time, error: record(time=time, error=error),
    st.floats(0, 20),
    st.sampled_from([LOST_PEER, WAITED_IN_VAIN, "ValueError: no"]),
)


@given(st.lists(st.tuples(ends, records, st.integers(18, 20), st.booleans()), min_size=1, max_size=6), st.data())
def test_whatever_happened_there_is_one_report_in_any_order(said: list[Any], data: st.DataObject) -> None:
    statements = [
        statement(told(standing(rank, collectives=count, stopped=stopped), exit=ended, record=raised), node=rank)
        for rank, (ended, raised, count, stopped) in enumerate(said)
    ]
    report = make_report(statements, world_size=len(said))
    assert make_report(data.draw(st.permutations(statements)), world_size=len(said)) == report
    assert len(set(order(report))) == len(order(report))


@pytest.mark.parametrize("unsaved", [None, "no room"])
def test_a_report_survives_json(unsaved: str | None) -> None:
    report = report_of(told(0, exit=end(time=2.0, status=-9)), told(1, record=record(time=1.0), stacks="s"))
    report = replace(report, unsaved=unsaved, file="failure.json", node=1)
    plain = json.loads(json.dumps(report.to_plain()))
    assert FailureReport.from_plain(plain) == report
    assert plain["first"]["cause"] == "ValueError: no"
    assert plain["first"]["kind"] == "exception"
    assert plain["living"] == {}


def test_the_main_thread_is_the_oldest_whichever_handled_the_signal() -> None:
    stacks = (
        'Current thread 0x7f01 (most recent call first):\n  File "a.py", line 1 in heartbeat\n\n'
        'Thread 0x7f00 (most recent call first):\n  File "b.py", line 2 in sleep\n  File "b.py", line 9 in main\n'
    )
    assert list(main_stack(stacks)) == ['File "b.py", line 2 in sleep', 'File "b.py", line 9 in main']


def test_of_a_crash_the_thread_that_crashed_matters() -> None:
    stacks = (
        'Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f01 (most recent call first):\n  File "a.py", '
        'line 1 in crash\n\nThread 0x7f00 (most recent call first):\n  File "b.py", line 2 in sleep\n\nExtension '
        "modules: numpy (total: 1)\n"
    )
    assert list(main_stack(stacks)) == ['File "a.py", line 1 in crash']
    assert list(main_stack("")) == []
