"""One failure, one report: which rank failed first, where, why, and what to try. No torch: the parent shows it.

Every node's monitor makes a statement of its ranks (`NodeMonitor.statement`). `make_report` merges the statements,
`report_failure` exchanges them and writes the file, `render` makes the text for the terminal.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from framework.config.topology import Topology
from framework.errors import EXIT_WRONG_REQUEST
from framework.monitoring.failure import FailureKind, RankFailure, advice
from framework.monitoring.node_exchange import NodeExchange
from framework.monitoring.node_monitor import NodeMonitor, RankState, max_progress, ranks_behind, stuck_for
from framework.monitoring.rank_status import main_stack
from framework.system.run_dir import RunDir, write_object
from framework.system.shown_text import masked_text, shown

_WAITED_SHARE = 0.5  # of the time-out: a rank that waited for less wasn't waiting for a hung one
_NOTICE_S = 5.0  # how much later than its peers' errors the end of a process may be seen

_RULE = "─" * 4
_SHOWN_RANKS = 8
_SHOWN_CAUSES = 4
_SHOWN_FRAMES = 6
_WIDTH = 100
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class FailureReport:
    """The first rank to fail or hang, and the others that failed."""

    world_size: int
    first: RankFailure
    others: tuple[RankFailure, ...]
    attempt: int = 0
    node: int = 0  # whose monitor made it
    living: Mapping[str, str] = field(default_factory=dict)  # rank → stacks, of the others that lived
    late: Sequence[Mapping[str, Any]] = ()  # ranks that others waited for earlier in the run
    file: str | None = None  # None if it couldn't be written; `unsaved` says why
    unsaved: str | None = None

    def to_plain(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "first": self.first.to_plain(),
            "others": [other.to_plain() for other in self.others],
            "advice": advice(self.first, world_size=self.world_size),
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> FailureReport:
        known = {key: value for key, value in plain.items() if key != "advice"}
        others = tuple(RankFailure.from_plain(other) for other in plain["others"])
        return FailureReport(**{**known, "first": RankFailure.from_plain(plain["first"]), "others": others})


# From the statements to the report


@dataclass(frozen=True, kw_only=True)
class _Rank(RankState):
    """What is stated of one rank; see `NodeMonitor.statement`."""

    stated_s: float
    timeout_s: float  # the shorter one of that in set-up and that in training
    place: Mapping[str, Any]  # which rank it is and where it was, as fields of RankFailure
    failure: Mapping[str, Any] | None  # how it failed by itself, as further fields
    stacks: str | None


def make_report(
    statements: Sequence[Mapping[str, Any]],
    *,
    world_size: int,
    attempt: int = 0,
    silent_nodes: Sequence[RankFailure] = (),
) -> FailureReport:
    """Merge the statements of all nodes.

    First is the earliest rank that failed by itself. If all that failed had lost a peer or timed out, it is the living
    rank they waited for, else a silent node. The end of a process is seen later than its peers notice it, and nodes'
    clocks differ, so a rank that failed by itself comes before those that lost a peer up to `_NOTICE_S` earlier.

    Args:
        silent_nodes: a failure of kind UNREACHABLE for each node that didn't answer.
    """
    statements = sorted(statements, key=lambda each: each["node"])
    ranks = [
        _Rank(**rank, stated_s=statement["time"], timeout_s=statement["timeout_s"])
        for statement in statements
        for rank in statement["ranks"]
    ]
    late = [each for statement in statements for each in statement["late"]]
    failures = [RankFailure.from_plain({**rank.place, **rank.failure}) for rank in ranks if rank.failure is not None]
    causes = [failure.time for failure in failures if not failure.lost_peer]

    def order(failure: RankFailure) -> tuple[bool, float, int]:
        follows = failure.lost_peer and any(time <= failure.time + _NOTICE_S for time in causes)
        return follows, failure.time, failure.rank

    ordered = sorted(failures, key=order)
    if not ordered:
        ordered = list(silent_nodes) or _hung(ranks, failures) or [_fallback_suspect(ranks, late)]
    elif ordered[0].lost_peer:
        hung = _hung(ranks, failures) or list(silent_nodes)
        hung_ranks = {failure.rank for failure in hung}
        ordered = [*hung, *(failure for failure in ordered if failure.rank not in hung_ranks)]
    else:
        ordered = [*ordered, *silent_nodes]
    first, *others = ordered
    living = {str(rank.rank): rank.stacks for rank in ranks if rank.alive and rank.stacks and rank.rank != first.rank}
    return FailureReport(world_size, first, tuple(others), attempt=attempt, living=living, late=late)


def _hung(ranks: Sequence[_Rank], failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the living ranks that the others waited for.

    If some have failed, no rank hung unless they had waited for a good part of the time-out.
    """
    if failures and not any(failure.timed_out for failure in failures):
        return []
    # A rank that lost a peer without waiting may be the one: it came when the others had gone.
    failed = {failure.rank for failure in failures if failure.timed_out or not failure.lost_peer}
    late = [rank for rank in ranks_behind(ranks) if rank.rank not in failed]
    waiting = [rank for rank in ranks if rank not in late]
    top = max((rank.collectives for rank in waiting), default=0)
    furthest = [rank for rank in waiting if rank.collectives == top]
    if failures and not any(rank.still_s >= _WAITED_SHARE * rank.timeout_s for rank in furthest):
        late = [rank for rank in late if rank.stopped]
    waited_s = max_progress(waiting).still_s or max((rank.still_s for rank in waiting), default=0.0)
    stated_s = max((rank.stated_s for rank in ranks), default=0.0)
    return [
        RankFailure(
            **rank.place,
            kind=FailureKind.STOPPED if rank.stopped else FailureKind.HUNG,
            time=min((failure.time for failure in failures), default=stated_s),
            waited_s=waited_s if furthest else None,
            waited_in=furthest[0].place["phase"] if furthest else None,
            stacks=rank.stacks,
        )
        for rank in sorted(late, key=lambda each: (not each.stopped, each.collectives, each.step, each.rank))
    ]


def _fallback_suspect(ranks: Sequence[_Rank], late: Sequence[Mapping[str, Any]]) -> RankFailure:
    """Return the rank that makes no progress though nobody waits for it; else the one that was waited for longest."""
    working = [rank for rank in ranks if rank.alive and not rank.done]
    was_late = max(late, key=lambda each: float(each["seconds"]), default=None)
    if was_late is None or stuck_for(working) > _WAITED_SHARE * min(rank.timeout_s for rank in ranks):
        rank = min(working or ranks, key=lambda each: (each.collectives, each.step))
        seen: dict[str, Any] = {"still_s": rank.still_s}
    else:
        rank = next(each for each in ranks if each.rank == was_late["rank"])
        seen = {"waited_s": was_late["seconds"], "phase": was_late["phase"]}
    return RankFailure(**{**rank.place, **seen}, kind=FailureKind.HUNG, time=rank.stated_s, stacks=rank.stacks)


def report_failure(
    monitor: NodeMonitor,
    exchange: NodeExchange | None,
    *,
    exits: Sequence[Mapping[str, Any]],
    cause: str,
    run_dir: RunDir,
    topology: Topology,
    attempt: int,
    is_last: bool,
) -> FailureReport:
    """Make the report of one attempt and write it. Takes seconds.

    Node 0 merges the statements of all nodes. Another node returns node 0's report; if that doesn't come, it makes one
    of what can be seen from its side of the cut.

    Args:
        exchange: None if no other process needs the report.
        exits: how ranks ended that weren't ended on purpose: rank, status (None: unknown), time, early.
        cause: sent to the other nodes.
        is_last: the run isn't restarted after this attempt.
    """
    own = monitor.statement({end["rank"]: end for end in exits})
    statements, silent = [own], list[RankFailure]()
    if exchange is not None:
        if monitor.node > 0:
            given = exchange.await_report(own, cause=cause)
            if given is not None:
                return FailureReport.from_plain(given)
        statements, silent_nodes = exchange.gather(own, cause=cause)
        for node in silent_nodes:
            rank, now, waited_s = topology.rank_of(node, 0), time.time(), exchange.silent_for(node)
            log = str(run_dir.rank_log(rank))
            silent.append(RankFailure(rank, FailureKind.UNREACHABLE, node, time=now, log=log, waited_s=waited_s))
    report = make_report(statements, world_size=topology.world_size, attempt=attempt, silent_nodes=silent)
    file = run_dir.failure_of(node=monitor.node, attempt=attempt, is_last=is_last or report.first.is_final)
    report = replace(report, file=str(file), node=monitor.node)
    try:
        write_object(file, _masked(report.to_plain()))
    except OSError as error:  # a full disk, which may be the very failure
        report = replace(report, file=None, unsaved=f"{file} can't be written: {error.strerror or error}.")
    if exchange is not None and monitor.node == 0:
        exchange.publish(report.to_plain())
    return report


def _masked(value: Any) -> Any:
    """Return a report without the passwords in its messages, such as in the address of a server that didn't answer."""
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(each) for each in value]
    return masked_text(value) if isinstance(value, str) else value


# The text for the terminal


def render(report: FailureReport) -> str:
    """Return the text: a wrong request's message; for any other failure its message or traceback, then a panel.

    A report may be somebody else's: control characters are shown as text.
    """
    return shown("\n".join(_lines(report)))


def _lines(report: FailureReport) -> list[str]:
    first = report.first
    unsaved = [] if report.unsaved is None else [report.unsaved]
    said = first.exception if first.expected else first.traceback
    if said is not None and first.expected and (first.exit_status == EXIT_WRONG_REQUEST or report.world_size == 1):
        return [said, *unsaved]
    lines = [] if said is None else [said.rstrip(), ""]
    lines.append(_shortened(f"{_RULE} Rank {first.rank} of {report.world_size} {_what_happened(first)}"))
    lines += [_shortened(f"  {line}") for line in _also_failed(report)]
    for name, text in _rows(report):
        lines += [f"  {name if number == 0 else '':<8} {line}" for number, line in enumerate(text)]
    return [*lines, *unsaved]


def late_line(event: Mapping[str, Any]) -> str:
    """Return what is said of a `late` or `caught_up` event of `NodeMonitor.check`."""
    if event["event"] == "caught_up":
        return f"Rank {event['rank']} caught up after {event['seconds']:.0f} s"
    return (
        f"Rank {event['rank']} (pid {event['pid']}) is late: the others have waited {event['seconds']:.0f} s for it; "
        f"it is {_where(event['phase'], step=event['step'])}"
    )


def _where(phase: str, *, step: int) -> str:
    return f"in {phase} " + (f"after step {step}" if step else "before its first step")


def _what_happened(first: RankFailure) -> str:
    """Return what the first rank did, without what stands above the panel."""
    if first.kind is FailureKind.UNREACHABLE:
        return f"is out of reach: {first.cause}"
    if first.expected:
        return f"(pid {first.pid}) failed first"
    failed = "" if first.kind in (FailureKind.HUNG, FailureKind.STOPPED) else "failed first: "
    cause = replace(first, said=None).cause  # which has a row of its own
    return f"(pid {first.pid}) {failed}{cause}".partition("\n")[0]


def _also_failed(report: FailureReport) -> Iterator[str]:
    """Yield a line for each other cause: ranks that failed by themselves before the first failure reached them."""
    causes = _by_words(report, independent=True)
    for cause, ranks in list(causes.items())[:_SHOWN_CAUSES]:
        yield f"{list_ranks(ranks).capitalize()} also failed: {cause}"
    if len(causes) > _SHOWN_CAUSES:
        yield f"and {len(causes) - _SHOWN_CAUSES} more, see the report"


def _rows(report: FailureReport) -> Iterator[tuple[str, list[str]]]:
    first = report.first
    where = [f"node {first.node}" + (f" ({first.host})" if first.host else "")]
    if first.kind is not FailureKind.UNREACHABLE:
        where += [first.devices, _where(first.phase, step=first.step)]
    yield "where", _wrapped(", ".join(where))
    consequences = _by_words(report, independent=False)
    if consequences:
        yield "others", _wrapped("; ".join(f"{list_ranks(ranks)} {what}" for what, ranks in consequences.items()))
    if first.said is not None:
        yield "printed", _wrapped(first.said)
    if first.stacks:
        # An exception's own stack is above; then this one shows where the rank hangs in closing.
        name = "closing" if first.kind is FailureKind.EXCEPTION else "stack"
        yield name, [_frame(line) for line in list(main_stack(first.stacks))[:_SHOWN_FRAMES]]
    words = advice(first, world_size=report.world_size)
    if words:
        yield "try", _wrapped(words)
    yield "log", [_near(first.log)]
    if report.file is not None:
        yield "report", [_near(report.file)]


def _by_words(report: FailureReport, *, independent: bool) -> dict[str, list[int]]:
    """Return the other ranks by what happened to them: of those with a cause of their own, or of all the rest."""
    found: dict[str, list[int]] = {}
    for other in report.others:
        is_same = other.kind is FailureKind.EXCEPTION and other.exception == report.first.exception
        if independent is (other.is_independent and not is_same):
            words = other.cause.partition("\n")[0] if independent else _consequence(other)
            found.setdefault(words, []).append(other.rank)
    return found


def _consequence(other: RankFailure) -> str:
    if other.kind in (FailureKind.HUNG, FailureKind.STOPPED):
        return f"didn't come either (in {other.phase})"
    if other.kind is FailureKind.UNREACHABLE:
        return other.cause
    if other.timed_out:
        return "timed out"
    return "lost the connection" if other.lost_peer else "failed with the same error"


def _frame(line: str) -> str:
    """Return `function at file:line` for a line of faulthandler's."""
    found = _FRAME.fullmatch(line)
    return line if found is None else f"{found['name']} at {_near(found['file'])}:{found['line']}"


def _near(path: str) -> str:
    """Return the path relative to the working directory if it is below it, or to site-packages."""
    return path.removeprefix(f"{Path.cwd()}/").rpartition("/site-packages/")[2]


def list_ranks(numbers: Sequence[int], *, noun: str = "rank") -> str:
    """Return `rank 3` or `ranks 0–2, 5`, shortened."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:_SHOWN_RANKS])
    more = " and more" if len(runs) > _SHOWN_RANKS else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 11, break_long_words=False, break_on_hyphens=False)


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1].rstrip()}…"
