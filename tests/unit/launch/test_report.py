from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest

from framework.launch.report import FailureReport, RankFailure, make_report


def record(rank: int, *, time: float, error: str = "ValueError: no", **changes: Any) -> dict[str, Any]:
    """What a rank that raised leaves behind."""
    said = {
        "rank": rank,
        "pid": 1000 + rank,
        "time": time,
        "exception": error,
        "traceback": f"Traceback (most recent call last):\n  in rank {rank}\n{error}\n",
        "expected": False,
        "exit_status": 1,
        "log": f"logs/rank_{rank}.log",
    }
    return {**said, **changes}


def end(rank: int, *, time: float, status: int, early: bool = False) -> dict[str, Any]:
    """What the fork server saw of a rank."""
    return {
        "event": "exited",
        "key": f"run#{rank}",
        "rank": rank,
        "pid": 1000 + rank,
        "time": time,
        "status": status,
        "early": early,
        "log": f"logs/rank_{rank}.log",
    }


def test_an_unexpected_error_keeps_its_traceback_and_says_which_rank_was_first() -> None:
    text = make_report([record(1, time=5.0)], [end(1, time=5.1, status=1)], world_size=4).render()
    assert text == (
        "Traceback (most recent call last):\n"
        "  in rank 1\n"
        "ValueError: no\n"
        "Rank 1 of 4 (pid 1001) failed first: ValueError: no\n"
        "Its log: logs/rank_1.log"
    )


def test_an_expected_error_is_its_message_and_nothing_else() -> None:
    said = record(0, time=1.0, error="optimizer.lr=lots isn't a number.", expected=True, exit_status=2)
    report = make_report([said, {**said, "rank": 1, "time": 1.1}], [], world_size=2)
    assert report.render() == "optimizer.lr=lots isn't a number."
    assert report.first.exit_status == 2


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL (the system's out-of-memory killer sends it too)"),
        (-signal.SIGTERM, "killed by SIGTERM"),
        (0, "left early with exit status 0, before its work was done"),
        (1, "left with exit status 1 without saying why"),
        (77, "left with exit status 77 without saying why"),
    ],
)
def test_a_silent_end_is_told_by_its_status(status: int, cause: str) -> None:
    report = make_report([], [end(2, time=1.0, status=status, early=status == 0)], world_size=3)
    assert report.first.cause == cause
    assert report.render() == f"Rank 2 of 3 (pid 1002) failed first: {cause}\nIts log: logs/rank_2.log"
    assert report.first.exit_status == 1


def test_any_signal_can_be_reported() -> None:
    """Real-time signals have numbers without a name."""
    number = signal.SIGRTMIN + 3
    assert str(int(number)) in make_report([], [end(0, time=1.0, status=-number)], world_size=1).first.cause


def test_first_is_who_failed_first_not_who_was_heard_first() -> None:
    records = [record(0, time=9.0, error="ConnectionError: peer"), record(3, time=7.0, error="KeyError: 'x'")]
    exits = [end(0, time=9.1, status=1), end(2, time=8.0, status=-9), end(3, time=7.1, status=1)]
    report = make_report(records, exits, world_size=4)
    assert [report.first.rank, *(other.rank for other in report.others)] == [3, 2, 0]
    assert "Rank 3 of 4 (pid 1003) failed first: KeyError: 'x'\nFollowed by ranks 2, 0.\n" in report.render()


def test_a_rank_that_raised_counts_from_then_however_long_it_took_to_leave() -> None:
    report = make_report(
        [record(0, time=5.0)], [end(0, time=30.0, status=1), end(1, time=6.0, status=-11)], world_size=2
    )
    assert report.first.rank == 0
    assert report.first.status == 1


def test_at_the_same_time_the_lower_rank_is_named() -> None:
    exits = [end(rank, time=1.0, status=1) for rank in (2, 1, 3)]
    assert make_report([], exits, world_size=4).first.rank == 1


def test_who_ended_well_is_not_in_the_report() -> None:
    report = make_report([], [end(0, time=0.5, status=0), end(1, time=1.0, status=-6)], world_size=2)
    assert report.first.rank == 1
    assert report.others == ()


def test_a_rank_that_raised_and_has_not_left_yet_is_in_the_report() -> None:
    report = make_report([record(1, time=2.0)], [end(0, time=3.0, status=1)], world_size=2)
    assert report.first == RankFailure(
        rank=1,
        pid=1001,
        time=2.0,
        status=1,
        exception="ValueError: no",
        traceback=record(1, time=2.0)["traceback"],
        expected=False,
        exit_status=1,
        log="logs/rank_1.log",
    )


@pytest.mark.parametrize(
    ("followers", "text"),
    [(1, "Followed by rank 1."), (2, "Followed by ranks 1, 2."), (12, "1, 2, 3, 4, 5, 6, 7, 8 and 4 more.")],
)
def test_those_that_followed_are_listed_shortly(followers: int, text: str) -> None:
    exits = [end(rank, time=float(rank), status=1) for rank in range(followers + 1)]
    assert text in make_report([], exits, world_size=followers + 1).render()


LOST_PEER = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:81",
    "RuntimeError: [pair.cc:547] Read error [127.0.0.1]:9: Connection reset by peer",
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "BrokenPipeError: [Errno 32] Broken pipe",
)


@pytest.mark.parametrize("error", LOST_PEER)
@pytest.mark.parametrize(("status", "early"), [(-9, False), (0, True), (3, False)])
def test_a_silent_end_comes_before_the_errors_of_those_it_left(error: str, status: int, early: bool) -> None:
    records = [record(0, time=5.0, error=error), record(3, time=5.1, error=error)]
    exits = [end(0, time=5.2, status=1), end(2, time=5.5, status=status, early=early)]
    report = make_report(records, exits, world_size=4)
    assert [report.first.rank, *(other.rank for other in report.others)] == [2, 0, 3]


def test_a_silent_end_long_after_an_error_is_not_its_cause() -> None:
    report = make_report([record(0, time=5.0, error=LOST_PEER[0])], [end(2, time=50.0, status=-9)], world_size=4)
    assert report.first.rank == 0


def test_a_silent_end_does_not_come_before_an_error_of_a_ranks_own() -> None:
    report = make_report([record(0, time=5.0)], [end(2, time=5.5, status=-9)], world_size=4)
    assert report.first.rank == 0


def test_what_was_wrapped_around_the_loss_of_a_peer_is_recognised() -> None:
    said = record(
        0, time=5.0, error="MyError: training failed", traceback=f"{LOST_PEER[0]}\n\nMyError: training failed"
    )
    assert make_report([said], [end(2, time=5.5, status=-9)], world_size=4).first.rank == 2


def test_a_report_that_could_not_be_saved_says_so() -> None:
    for expected in (False, True):
        report = make_report([record(1, time=1.0, expected=expected)], [], world_size=2)
        text = replace(report, unsaved="failure.json can't be written: No space left on device.").render()
        assert "ValueError: no" in text
        assert text.endswith("\nfailure.json can't be written: No space left on device.")


@pytest.mark.parametrize("unsaved", [None, "no room"])
def test_a_report_survives_json(unsaved: str | None) -> None:
    report = make_report([record(1, time=1.0)], [end(0, time=2.0, status=-9)], world_size=2)
    report = replace(report, unsaved=unsaved)
    plain = json.loads(json.dumps(report.to_plain()))
    assert FailureReport.from_plain(plain) == report
    assert plain["cause"] == "ValueError: no"
