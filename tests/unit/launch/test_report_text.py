"""The text of a failure: its cause, where it was, what the other ranks did, and what to try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.internals import (
    FailureKind,
    FailureReport,
    RankFailure,
    RankPhase,
    advice,
    late_line,
    list_ranks,
    make_report,
    render_failure,
)
from tests.unit.launch.statements import LOST_PEER, TIMED_OUT, end, observed, record, state, statement


def report_of(*ranks: dict[str, Any], world_size: int | None = None) -> FailureReport:
    return make_report([statement(*ranks)], world_size=world_size or len(ranks))


def test_an_unexpected_error_shows_traceback_and_rank() -> None:
    lost = [observed(rank, record=record(time=5.0, error=LOST_PEER)) for rank in (0, 2, 3)]
    report = report_of(*lost, observed(1, record=record(time=5.0), exit=end(time=5.1, status=1)))
    assert render_failure(replace(report, file="runs/x/failure.json")) == (
        "Traceback (most recent call last):\n"
        "  File x\n"
        "ValueError: no\n"
        "\n"
        "──── Rank 1 of 4 (pid 1001) failed first: ValueError: no\n"
        "  where    node 0 (host0), CPU, in backward after step 7\n"
        "  others   ranks 0, 2–3 lost the connection\n"
        "  log      logs/rank_1.log\n"
        "  report   runs/x/failure.json"
    )


STACKS = (
    'Thread 0x7f02 (most recent call first):\n  File "b.py", line 2 in wait\n\n'
    "Current thread 0x7f00 (most recent call first):\n"
    f'  File "{Path.cwd()}/recipes/mine.py", line 27 in read\n'
    '  File "/usr/lib/python3/site-packages/torch/utils/data.py", line 7 in fetch\n'
)


def test_a_hung_rank_is_shown_with_advice() -> None:
    at = state(1, collectives=19, phase=RankPhase.DATA, still_s=40.0)
    waiting = observed(state(0, still_s=30.0), record=record(time=5.0, error=TIMED_OUT))
    text = render_failure(report_of(waiting, observed(at, stacks=STACKS), observed(state(2, still_s=31.0))))
    assert text.startswith("──── Rank 1 of 3 (pid 1001) hung; the others waited 30 s in backward\n")
    for line in ("others   rank 0 timed out", "stack    read at recipes/mine.py:27", "fetch at torch/utils/data.py:7"):
        assert f"  {line}\n" in text
    assert "try      It was loading data" in text


def test_an_expected_error_shows_no_traceback() -> None:
    wrong = record(time=1.0, error="optimizer.lr=lots isn't a number.", expected=True, exit_status=2)
    refused = report_of(observed(0, record=wrong), observed(1, record={**wrong, "time": 1.1}))
    assert (render_failure(refused), refused.first.exit_status) == ("optimizer.lr=lots isn't a number.", 2)
    full = record(time=1.0, error="The disk is full.\nMake room.", expected=True)
    assert render_failure(report_of(observed(0, record=full))) == "The disk is full.\nMake room."
    text = render_failure(report_of(observed(0), observed(1, record=full)))
    assert text.startswith("The disk is full.\nMake room.\n\n──── Rank 1 of 2 (pid 1001) failed first\n")


@pytest.mark.parametrize("status", [-9, -11, 0, 3, None])
def test_no_line_is_long(status: int | None) -> None:
    error = "RuntimeError: " + "very " * 40 + "long\nand more"
    ended = report_of(observed(0), observed(1, exit=end(time=1.0, status=status, early=status == 0)), world_size=20_000)
    raised = render_failure(report_of(observed(0), observed(1, record=record(time=1.0, error=error))))
    assert "and more" in raised.splitlines()
    framed = raised[raised.index("────") :]
    for line in render_failure(ended).splitlines() + framed.splitlines():
        assert len(line) <= 100


def test_the_states_of_other_ranks_are_listed() -> None:
    at = state(0, step=0, phase=RankPhase.MEETING)
    report = report_of(
        observed(at, record=record(time=1.0)),
        observed(1, record=record(time=2.0, error=LOST_PEER)),
        observed(2, record=record(time=2.0, error=TIMED_OUT)),
        observed(3, record=record(time=2.0, error="KeyError: 'x'")),
        observed(4, exit=end(time=3.0, status=-11)),
        observed(5, exit=end(time=3.0, status=-11)),
        observed(6, record=record(time=3.0)),
    )
    text = render_failure(replace(report, unsaved="failure.json can't be written: No space left on device."))
    assert "CPU, in meeting before its first step\n" in text
    assert "\n  Rank 3 also failed: KeyError: 'x'\n  Ranks 4–5 also failed: killed by SIGSEGV\n  where " in text
    assert "  others   rank 6 failed with the same error; rank 1 lost the connection; rank 2 timed out\n" in text
    assert text.endswith("\nfailure.json can't be written: No space left on device.")


def test_a_few_of_many_other_causes_are_shown() -> None:
    text = render_failure(
        report_of(*(observed(rank, record=record(time=rank, error=f"KeyError: {rank}")) for rank in range(9)))
    )
    assert text.count("also failed: KeyError") == 4
    assert "\n  and 4 more, see the report\n" in text


def test_many_ranks_are_listed_shortly() -> None:
    assert [list_ranks(ranks) for ranks in ([3], [2, 0, 1, 5])] == ["rank 3", "ranks 0–2, 5"]
    assert list_ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and more"


def test_a_late_rank_is_one_line() -> None:
    event = {"event": "late", "rank": 2, "pid": 7, "phase": "data", "step": 4, "seconds": 10.2}
    assert late_line(event) == "Rank 2 (pid 7) is late: the others have waited 10 s for it; it is in data after step 4"
    assert late_line({**event, "step": 0}).endswith("it is in data before its first step")
    assert "after 21 s" in late_line({**event, "event": "caught_up", "seconds": 21.0})


# What to try


def failure(kind: FailureKind, **facts: Any) -> RankFailure:
    at = {"rank": 1, "node": 0, "host": "a", "local_rank": 1, "pid": 7, "devices": "CPU", "phase": "data", "step": 4}
    return RankFailure(**{**at, "kind": kind, "time": 1.0, "log": "log", **facts})


def exception(text: str, **facts: Any) -> RankFailure:
    return failure(FailureKind.EXCEPTION, exception=text, **facts)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (failure(FailureKind.SIGNAL, signal="SIGKILL"), "no sign of it"),
        (failure(FailureKind.SIGNAL, signal="SIGKILL", oom=True), "data.batch_size"),
        (failure(FailureKind.SIGNAL, signal="SIGSEGV"), "its log may say more"),
        (failure(FailureKind.SIGNAL, signal="SIGSEGV", stacks="…"), "the Python stack of that moment"),
        (failure(FailureKind.SIGNAL, signal="SIGBUS"), "/dev/shm"),
        (failure(FailureKind.SIGNAL, signal="SIGTERM"), "signal to the command itself"),
        (failure(FailureKind.EXIT, status=0), "exit()"),
        (failure(FailureKind.STOPPED), "kill -STOP"),
        (failure(FailureKind.HUNG, phase="forward"), "raise backend.timeout"),
        (failure(FailureKind.HUNG, phase="data"), "data.num_workers=0 shows the line"),
        (failure(FailureKind.HUNG, phase="forward", step=0), "raise backend.init_timeout"),
        (failure(FailureKind.HUNG, phase="starting", step=0), "raise backend.init_timeout"),
        (failure(FailureKind.HUNG, phase="function", step=0), "Its stack shows where it is."),
        (failure(FailureKind.UNREACHABLE, host=""), "node 0"),
        (exception("torch.OutOfMemoryError: CUDA out of memory. Tried"), "data.batch_size"),
        (exception("torch.OutOfMemoryError: CUDA out of memory. Tried", phase="evaluate"), "data.eval_batch_size"),
        (exception("RuntimeError: CUDA error: device-side assert triggered"), "CUDA_LAUNCH"),
        (
            exception("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
            "CUDA_LAUNCH",
        ),
        (exception("AcceleratorError: CUDA error: an illegal memory access was encountered"), "CUDA_LAUNCH"),
        (exception(f"ImportError: /home/me/rv/c{'r4z' * 17}.main.so: cannot read file data"), "framework/compiled"),
        (exception("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "CUDA_LAUNCH"),
        (exception("RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed."), "data.num_workers=0"),
        (exception(TIMED_OUT, lost_peer=True, timed_out=True), "different collectives"),
        (exception(LOST_PEER, lost_peer=True), "look at the ends of their logs"),
        *((failure(FailureKind.HUNG, phase=phase.label), "timeout") for phase in RankPhase),
    ],
)
def test_what_to_try_fits_what_happened(first: RankFailure, words: str) -> None:
    assert words in advice(first, world_size=4)


@pytest.mark.parametrize(
    "first", [exception("ValueError: no"), exception("CUDA out of memory: not even a batch of 1 fits", expected=True)]
)
def test_an_error_that_says_everything_needs_no_advice(first: RankFailure) -> None:
    assert advice(first, world_size=4) == ""
