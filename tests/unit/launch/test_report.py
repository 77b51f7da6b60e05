"""One failure, one report: what several nodes state of their ranks becomes one order of events and its first cause."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.internals import FailureKind, FailureReport, RankFailure, RankPhase, make_report
from tests.unit.launch.statements import LOST_PEER, TIMED_OUT, end, observed, record, state, statement


def report_of(*ranks: dict[str, Any], **how: Any) -> FailureReport:
    return make_report([statement(*ranks)], world_size=len(ranks), **how)


def order(report: FailureReport) -> list[int]:
    return [failure.rank for failure in (report.first, *report.others)]


# What one rank's end says


@pytest.mark.parametrize(
    ("status", "oom", "cause"),
    [
        (-signal.SIGSEGV, False, "killed by SIGSEGV"),
        (-signal.SIGKILL, True, "killed by SIGKILL; the system was out of memory"),
        # This signal has no name.
        (-(signal.SIGRTMIN + 3), False, str(signal.SIGRTMIN + 3)),
        (0, False, "exited with status 0 before its work was done"),
        (77, False, "exited with status 77 and without an error"),
        (None, False, "its process is gone"),
        (None, True, "the system was out of memory"),
    ],
)
def test_a_silent_end_is_explained_by_its_status(status: int | None, oom: bool, cause: str) -> None:
    report = report_of(observed(0), observed(1, exit=end(time=1.0, status=status, early=status == 0), oom=oom))
    assert (report.first.rank, report.first.exit_status, report.others) == (1, 1, ())
    assert cause in report.first.cause


@pytest.mark.parametrize(
    ("words", "status", "name"),
    [
        ("Segmentation fault", None, "SIGSEGV"),
        ("Floating-point exception", None, "SIGFPE"),
        ("init_sys_streams: no", None, None),
        ("Segmentation fault", 3, None),
    ],
)
def test_the_stack_names_an_unseen_signal(words: str, status: int | None, name: str | None) -> None:
    stacks = f'Fatal Python error: {words}\n\nCurrent thread 0x1 (most recent call first):\n  File "a", line 1 in f\n'
    first = report_of(observed(0), observed(1, exit=end(time=1.0, status=status), stacks=stacks)).first
    assert (first.kind, first.signal, first.status) == (FailureKind.SIGNAL if name else FailureKind.EXIT, name, status)
    assert first.stacks == stacks


def test_the_report_says_where_the_rank_was() -> None:
    at = state(5, phase=RankPhase.CHECKPOINT, step=31, alive=False)
    failed = observed(at, exit=end(time=8.0, status=-11), devices="GPU 1", local_rank=1, stacks="Fatal Python error: x")
    report = make_report([statement(observed(0)), statement(failed, node=1)], world_size=8, attempt=2)
    assert (report.attempt, report.world_size) == (2, 8)
    assert report.first == RankFailure(
        **{"rank": 5, "node": 1, "host": "host1", "local_rank": 1, "pid": 1005, "devices": "GPU 1"},  # type: ignore[arg-type]
        **{"phase": "checkpoint", "step": 31, "time": 8.0, "log": "logs/rank_5.log"},  # type: ignore[arg-type]
        **{"kind": FailureKind.SIGNAL, "status": -11, "signal": "SIGSEGV", "stacks": "Fatal Python error: x"},  # type: ignore[arg-type]
    )


# Who was first


def raised(rank: int, time: float, error: str = "ValueError: no", **changes: Any) -> dict[str, Any]:
    return observed(rank, record=record(time=time, error=error), **changes)


def ended(rank: int, time: float, status: int | None = -9, *, early: bool = False) -> dict[str, Any]:
    return observed(rank, exit=end(time=time, status=status, early=early))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # by time, not by when it was heard
        ([raised(0, 9.0, LOST_PEER), observed(1), ended(2, 8.0), raised(3, 7.0, "KeyError: 'x'")], [3, 2, 0]),
        # from when it raised, however long it took to leave, or if it has yet to
        ([raised(0, 5.0, exit=end(time=30.0, status=1)), ended(1, 6.0, -11)], [0, 1]),
        ([ended(0, 3.0, 1), raised(1, 2.0)], [1, 0]),
        # at the same time the lower rank
        ([ended(2, 1.0), ended(1, 1.0)], [1, 2]),
        # 0, and 75 for one that stopped on request, are no failures
        ([ended(0, 0.5, 0), ended(1, 1.0, -6), ended(2, 0.5, 75)], [1]),
        # a silent end is seen late, and may have caused the errors of those it left, but not long after
        ([raised(0, 5.0, LOST_PEER), ended(2, 9.9)], [2, 0]),
        ([raised(0, 5.0, LOST_PEER), ended(2, 10.1)], [0, 2]),
        ([raised(0, 5.0), ended(2, 5.5)], [0, 2]),
        # Clocks of nodes may differ.
        ([raised(0, 5.0, LOST_PEER), raised(1, 6.5)], [1, 0]),
    ],
)
def test_the_first_is_who_failed_first_of_itself(ranks: list[dict[str, Any]], expected: list[int]) -> None:
    assert order(report_of(*ranks)) == expected


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


def test_a_silent_end_precedes_the_errors_it_caused() -> None:
    wrapped = record(time=5.0, error="MyError: training failed", of_peers=LOST_PEER)
    assert order(report_of(observed(0, record=wrapped), ended(1, 5.5, 0, early=True), raised(2, 5.1, LOST[2]))) == [
        1,
        0,
        2,
    ]


# Who hung


def test_the_living_rank_others_awaited_is_first() -> None:
    report = report_of(
        observed(state(0, still_s=31.0), record=record(time=5.0, error=TIMED_OUT)),
        observed(state(1, collectives=19, phase=RankPhase.DATA), stacks="its stacks"),
        observed(state(2, still_s=30.0), stacks="another's"),
    )
    assert order(report) == [1, 0]
    assert (report.first.kind, report.first.phase, report.first.stacks) == (FailureKind.HUNG, "data", "its stacks")
    assert report.first.cause == "hung; the others waited 30 s in backward"
    assert report.living == {"2": "another's"}


def test_a_failed_rank_does_not_hang_while_leaving() -> None:
    error = "torch.distributed.DistStoreError: wait timeout after 30000ms, keys: /mine"
    report = report_of(observed(0), observed(state(1, collectives=19), record=record(time=5.0, error=error)))
    assert (order(report), report.first.kind) == ([1], FailureKind.EXCEPTION)


@pytest.mark.parametrize(
    "error",
    ["RuntimeError: the feature database: timed out waiting for an answer", "BrokenPipeError: [Errno 32] Broken pipe"],
)
def test_an_own_error_is_no_lost_peer(error: str) -> None:
    """The lines of source code in its traceback don't count."""
    said = record(time=5.0, error=error, traceback=f"    raise {LOST_PEER}\n{error}")
    hung = observed(state(1, collectives=19, phase=RankPhase.DATA), stacks="asleep")
    report = report_of(observed(0, record=said), hung, raised(2, 4.0, LOST_PEER))
    assert order(report) == [0, 2]
    assert (report.first.kind, report.first.lost_peer, report.first.timed_out) == (FailureKind.EXCEPTION, False, False)


@pytest.mark.parametrize(
    "error",
    [
        "torch.distributed.DistBackendError: NCCL timed out waiting",
        TIMED_OUT,
        "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /mine",
    ],
)
@pytest.mark.parametrize("hung", [False, True])
def test_half_a_timeout_of_waiting_means_a_hang(error: str, hung: bool) -> None:
    report = report_of(
        observed(state(0, still_s=10.1 if hung else 9.9), record=record(time=5.0, error=error)),
        observed(state(1, collectives=19, still_s=50.0)),
        observed(state(2, alive=False, collectives=18, still_s=60.0)),
    )
    assert order(report) == ([1, 0] if hung else [0])


def test_a_rank_that_arrived_too_late_is_first() -> None:
    waited = observed(
        state(0, alive=False, still_s=12.5),
        record=record(time=5.0, error=TIMED_OUT),
        exit=end(time=5.1, status=1),
    )
    came = observed(state(1, collectives=19), record=record(time=5.2, error=LOST_PEER))
    report = make_report([statement(waited), statement(came, node=1)], world_size=2)
    assert order(report) == [1, 0]
    assert (report.first.kind, report.first.node, report.first.host) == (FailureKind.HUNG, 1, "host1")
    # Where it was until the others were gone.
    assert report.first.exception == LOST_PEER


def test_a_silent_node_that_was_awaited_is_first() -> None:
    at = {"rank": 2, "local_rank": 0, "pid": 0, "devices": "", "phase": "unknown", "step": 0, "log": "log"}
    silent = [RankFailure(kind=FailureKind.UNREACHABLE, node=1, host="", time=9.0, waited_s=7.0, **at)]  # type: ignore[arg-type]
    for of_node_0 in (raised(0, 5.0, LOST_PEER), observed(0)):
        assert report_of(of_node_0, silent_nodes=silent).first.kind is FailureKind.UNREACHABLE
    own = report_of(raised(0, 5.0), silent_nodes=silent)
    assert [failure.kind for failure in (own.first, *own.others)] == [FailureKind.EXCEPTION, FailureKind.UNREACHABLE]


def test_a_rank_that_just_caught_up_is_named() -> None:
    late = [{"rank": 1, "phase": "data", "step": 3, "seconds": 65.0}, {"rank": 0, "phase": "data", "seconds": 2.0}]
    report = make_report([statement(observed(0), observed(1), late=late)], world_size=2)
    assert (report.first.rank, report.first.kind, report.first.phase) == (1, FailureKind.HUNG, "data")
    assert report.first.cause == "hung; the others waited 65 s"
    assert report.late == late


@given(st.integers(2, 6), st.data())
def test_the_hung_rank_is_first_whatever_others_do(size: int, data: st.DataObject) -> None:
    hung = data.draw(st.integers(0, size - 1))
    phase = data.draw(st.sampled_from([phase for phase in RankPhase if phase > RankPhase.MEETING]))
    at = state(hung, collectives=19, phase=phase, stopped=data.draw(st.booleans()))
    ranks = [observed(at)]
    for rank in set(range(size)) - {hung}:
        one_raised = rank == (hung + 1) % size
        fate = "raised" if one_raised else data.draw(st.sampled_from(["waits", "raised", "left", "lost"]))
        said = record(time=data.draw(st.floats(50, 60)), error=LOST_PEER if fate == "lost" else TIMED_OUT)
        ranks.append(
            observed(
                state(rank, alive=fate != "left", still_s=data.draw(st.floats(10, 40))),
                record=None if fate == "waits" else said,
                exit=end(time=60.1, status=1) if fate == "left" else None,
            )
        )
    report = report_of(*data.draw(st.permutations(ranks)))
    assert (report.first.rank, report.first.kind) == (hung, FailureKind.STOPPED if at.stopped else FailureKind.HUNG)


@given(st.integers(2, 6), st.data())
def test_the_dead_rank_is_first_in_any_order(size: int, data: st.DataObject) -> None:
    dead = data.draw(st.integers(0, size - 1))
    # The end of a process is seen late, and clocks of nodes differ.
    seen = st.floats(100, 104)
    ranks = [
        observed(
            rank,
            record=record(time=data.draw(seen), error=data.draw(st.sampled_from(LOST))),
            exit=end(time=data.draw(seen), status=1),
        )
        for rank in range(size)
    ]
    status = data.draw(st.sampled_from([-9, -11, 3, 0]))
    said = data.draw(st.sampled_from([None, record(time=data.draw(seen), error="KeyError")]))
    ranks[dead] = observed(dead, record=said, exit=end(time=data.draw(seen), status=status, early=status == 0))
    cut = data.draw(st.integers(0, size))
    statements = [statement(*ranks[:cut]), statement(*ranks[cut:], node=1)]
    report = make_report(data.draw(st.permutations(statements)), world_size=size)
    assert (report.first.rank, len(report.others)) == (dead, size - 1)


@given(st.data())
def test_statements_in_any_order_give_one_report(data: st.DataObject) -> None:
    time = st.floats(0, 20)
    ranks = []
    for rank in range(data.draw(st.integers(1, 6))):
        at = state(rank, collectives=data.draw(st.integers(18, 20)), stopped=data.draw(st.booleans()))
        status = data.draw(st.sampled_from([0, 1, -9, 75, None]))
        error = data.draw(st.sampled_from([*LOST, "KeyError"]))
        ranks.append(
            observed(
                at,
                exit=data.draw(st.sampled_from([None, end(time=data.draw(time), status=status)])),
                record=data.draw(st.sampled_from([None, record(time=data.draw(time), error=error)])),
            )
        )
    statements = [statement(each, node=rank) for rank, each in enumerate(ranks)]
    report = make_report(statements, world_size=len(ranks))
    assert make_report(data.draw(st.permutations(statements)), world_size=len(ranks)) == report
    assert len(set(order(report))) == len(order(report))
    report = replace(report, unsaved="no room", file="failure.json", node=1)
    plain = json.loads(json.dumps(report.to_plain()))
    assert FailureReport.from_plain(plain) == report
    assert plain["first"]["cause"] == report.first.cause
