"""A failure report as a person reads it in a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.errors import EXIT_WRONG_REQUEST
from framework.launch.advice import advice
from framework.launch.failure import Kind, RankFailure
from framework.launch.report import FailureReport, main_stack

_RULE = "─" * 4
_SHOWN_RANKS = 8
_SHOWN_FRAMES = 6
_WIDTH = 100
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def render(report: FailureReport) -> str:
    """The text: a wrong request is its message; of any other failure that or the traceback, and then the panel."""
    first = report.first
    unsaved = [] if report.unsaved is None else [report.unsaved]
    said = first.exception if first.expected else first.traceback
    if said is not None and first.expected and (first.exit_status == EXIT_WRONG_REQUEST or report.world_size == 1):
        return "\n".join([said, *unsaved])
    lines = [] if said is None else [said.rstrip(), ""]
    lines.append(_shortened(f"{_RULE} Rank {first.rank} of {report.world_size} {_verb(first)}"))
    for name, text in _rows(report):
        lines += [f"  {name if number == 0 else '':<8} {line}" for number, line in enumerate(text)]
    return "\n".join([*lines, *unsaved])


def late_line(event: Mapping[str, Any]) -> str:
    """What is said of a rank that others wait for, or no longer: the `late` and `caught_up` events of a watch."""
    if event["event"] == "caught_up":
        return f"Rank {event['rank']} has come after {event['seconds']:.0f} s"
    return (
        f"Rank {event['rank']} (pid {event['pid']}) is late: the others have waited {event['seconds']:.0f} s for it; "
        f"it is {_place(event['phase'], step=event['step'])}"
    )


def staying_line(event: Mapping[str, Any], *, limit_s: float) -> str:
    """What is said of a rank that is ended since it doesn't leave: the `stays` event of a keeper."""
    where = "; ".join(_frame(line) for line in event["frames"][:_SHOWN_FRAMES])
    return (
        f"Rank {event['rank']} (pid {event['pid']}) has done its work but doesn't leave: ended after {limit_s:g} s"
        + (f"; a thread or an exit function was in {where}" if where else "")
    )


def _place(phase: str, *, step: int) -> str:
    return f"in {phase} " + (f"after step {step}" if step else "before its first step")


def _verb(first: RankFailure) -> str:
    """What the first rank did. Of a long message the first line, of an expected error none: all of it is above."""
    if first.kind is Kind.UNREACHABLE:
        return f"is out of reach: {first.cause}"
    if first.expected:
        return f"(pid {first.pid}) failed first"
    cause = next(iter(first.cause.splitlines()), "")
    return f"(pid {first.pid}) {cause if first.kind in (Kind.HUNG, Kind.STOPPED) else f'failed first: {cause}'}"


def _rows(report: FailureReport) -> Iterator[tuple[str, list[str]]]:
    first = report.first
    where = [f"node {first.node}" + (f" ({first.host})" if first.host else "")]
    if first.kind is not Kind.UNREACHABLE:
        where += [first.devices, _place(first.phase, step=first.step)]
    yield "where", _wrapped(", ".join(where))
    if report.others:
        yield "others", _wrapped("; ".join(_groups(report.others, first=first)))
    if first.stacks:
        yield "stack", [_frame(line) for line in list(main_stack(first.stacks))[:_SHOWN_FRAMES]]
    words = advice(first, world_size=report.world_size)
    if words:
        yield "try", _wrapped(words)
    yield "log", [_near(first.log)]
    if report.file is not None:
        yield "report", [_near(report.file)]


def _frame(line: str) -> str:
    """`function at file:line` of a line of faulthandler's."""
    found = _FRAME.fullmatch(line)
    return line if found is None else f"{found['name']} at {_near(found['file'])}:{found['line']}"


def _near(path: str) -> str:
    """As it is called from the working directory, where it lies below that; without the way to an installed package."""
    return path.removeprefix(f"{Path.cwd()}/").rpartition("/site-packages/")[2]


def _groups(others: Sequence[RankFailure], *, first: RankFailure) -> Iterator[str]:
    """What became of the others, those of a kind together."""
    kinds: dict[str, list[int]] = {}
    for other in others:
        kinds.setdefault(_fate(other, first=first), []).append(other.rank)
    for fate, ranks in kinds.items():
        yield f"{list_ranks(ranks)} {fate}"


def _fate(other: RankFailure, *, first: RankFailure) -> str:
    if other.kind in (Kind.HUNG, Kind.STOPPED):
        return f"didn't come either (in {other.phase})"
    if other.timed_out:
        return "timed out"
    if other.lost_peer:
        return "lost the connection"
    if other.kind is Kind.EXCEPTION and other.exception == first.exception:
        return "failed with the same error"
    if other.kind is Kind.EXCEPTION and other.expected:
        return f"failed: {next(iter(other.cause.splitlines()), '')}"
    if other.kind is Kind.EXCEPTION:
        return f"raised {str(other.exception).partition(':')[0]}"
    return other.cause


def list_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0–2, 5`; shortened."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:_SHOWN_RANKS])
    more = " and more" if len(runs) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 11, break_long_words=False, break_on_hyphens=False)


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1].rstrip()}…"
