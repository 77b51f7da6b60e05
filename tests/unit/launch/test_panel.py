from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.launch.panel import late_line, list_ranks, render
from framework.launch.report import FailureReport, make_report
from framework.pulse import Phase
from tests.unit.launch.statements import LOST_PEER, WAITED_IN_VAIN, end, record, standing, statement, told


def report_of(*ranks: dict[str, Any], world_size: int | None = None) -> FailureReport:
    return make_report([statement(*ranks)], world_size=world_size or len(ranks))


def test_an_unexpected_error_is_its_traceback_and_then_who_was_first_and_where() -> None:
    lost = [told(rank, record=record(time=5.0, error=LOST_PEER)) for rank in (0, 2, 3)]
    report = report_of(*lost, told(1, record=record(time=5.0), exit=end(time=5.1, status=1)))
    assert render(replace(report, file="runs/x/failure.json")) == (
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


def test_a_hung_rank_is_shown_with_its_stack_and_what_to_try() -> None:
    at = standing(1, collectives=19, phase=Phase.DATA, still_s=40.0)
    waiting = told(standing(0, still_s=30.0), record=record(time=5.0, error=WAITED_IN_VAIN))
    assert render(report_of(waiting, told(at, stacks=STACKS), told(standing(2, still_s=31.0)))) == (
        "──── Rank 1 of 3 (pid 1001) hung; the others waited 30 s in backward\n"
        "  where    node 0 (host0), CPU, in data after step 7\n"
        "  others   rank 0 timed out\n"
        "  stack    read at recipes/mine.py:27\n"
        "           fetch at torch/utils/data.py:7\n"
        "  try      It was loading data: look at its disk and its share of the files. Where a worker loads,\n"
        "           data.num_workers=0 shows the line. If it is only slow, raise backend.timeout.\n"
        "  log      logs/rank_1.log"
    )


def test_a_wrong_request_is_its_message_and_nothing_else() -> None:
    said = record(time=1.0, error="optimizer.lr=lots isn't a number.", expected=True, exit_status=2)
    report = report_of(told(0, record=said), told(1, record={**said, "time": 1.1}))
    assert render(report) == "optimizer.lr=lots isn't a number."
    assert report.first.exit_status == 2


def test_an_expected_error_of_one_of_several_is_its_message_and_where() -> None:
    said = record(time=1.0, error="The disk is full.\nMake room.", expected=True)
    assert render(report_of(told(0, record=said))) == "The disk is full.\nMake room."
    text = render(report_of(told(0), told(1, record=said)))
    assert text.startswith("The disk is full.\nMake room.\n\n──── Rank 1 of 2 (pid 1001) failed first\n")
    assert "Traceback" not in text


def test_a_long_message_is_above_and_shortened_in_the_panel() -> None:
    said = record(time=1.0, error="RuntimeError: " + "very " * 40 + "long\nand more")
    lines = render(report_of(told(0), told(1, record=said))).splitlines()
    (header,) = [line for line in lines if line.startswith("────")]
    assert len(header) <= 100
    assert header.endswith("…")
    assert "and more" in lines


def test_no_line_of_the_panel_is_long() -> None:
    for status in (-9, -11, -15, 0, 3):
        report = report_of(told(0), told(1, exit=end(time=1.0, status=status, early=status == 0)), world_size=20_000)
        assert max(map(len, render(report).splitlines())) <= 100


def test_where_before_the_first_step() -> None:
    at = standing(0, step=0, phase=Phase.MEETING, alive=False)
    assert "CPU, in meeting before its first step\n" in render(report_of(told(at, exit=end(time=1.0, status=-9))))


def test_a_report_that_could_not_be_saved_says_so() -> None:
    for expected in (False, True):
        report = report_of(told(1, record=record(time=1.0, expected=expected)))
        text = render(replace(report, unsaved="failure.json can't be written: No space left on device."))
        assert "ValueError: no" in text
        assert text.endswith("\nfailure.json can't be written: No space left on device.")


def test_what_became_of_the_others() -> None:
    report = report_of(
        told(0, record=record(time=1.0)),
        told(1, record=record(time=2.0, error=LOST_PEER)),
        told(2, record=record(time=2.0, error=WAITED_IN_VAIN)),
        told(3, record=record(time=2.0, error="KeyError: 'x'")),
        told(4, exit=end(time=3.0, status=-11)),
        told(5, exit=end(time=3.0, status=-11)),
    )
    (line,) = [line for line in render(report).splitlines() if line.startswith("  others")]
    assert line == (
        "  others   rank 3 raised KeyError; ranks 4–5 killed by SIGSEGV; rank 1 lost the connection; rank 2"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0, 1, 5], "ranks 0–2, 5"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and more"),
        (range(16_384), "ranks 0–16383"),
    ],
)
def test_ranks_are_listed_shortly(ranks: list[int], text: str) -> None:
    assert list_ranks(ranks) == text


def test_a_late_rank_is_told_in_a_line() -> None:
    event = {"event": "late", "rank": 2, "pid": 7, "phase": "data", "step": 4, "seconds": 10.2}
    assert late_line(event) == (
        "Rank 2 (pid 7) is late: the others have waited 10 s for it; it is in data after step 4"
    )
    assert late_line({**event, "step": 0}).endswith("it is in data before its first step")
    assert late_line({**event, "event": "caught_up", "seconds": 21.0}) == "Rank 2 has come after 21 s"
