"""One failure, one report: a file, and a text for the terminal. No torch: the parent shows it.

`report_failure` exchanges the statements of all nodes, asks `failure` which rank is to blame, and writes the file.
`render` makes the text.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from framework.config.topology import Topology
from framework.errors import EXIT_WRONG_REQUEST
from framework.monitoring.advice import advice
from framework.monitoring.failure import FailureKind, RankFailure, find_first
from framework.monitoring.node_exchange import NodeExchange
from framework.monitoring.node_monitor import NodeMonitor
from framework.monitoring.stacks import main_stack, near, shown_frame
from framework.system.formatting import format_binary_bytes, format_numbers
from framework.system.run_dir import RunDir, write_object
from framework.system.shown_text import masked_text, shown

_RULE = "─" * 4
_SHOWN_RANKS = 8
_SHOWN_CAUSES = 4
_SHOWN_FRAMES = 6
_WIDTH = 100
# Of the names of the rows, before their text.
_INDENT = 11


@dataclass(frozen=True)
class FailureReport:
    """The first rank to fail or hang, and the others that failed."""

    world_size: int
    first: RankFailure
    others: tuple[RankFailure, ...]
    attempt: int = 0
    # Whose monitor made it.
    node: int = 0
    # The stacks of the others that lived, by rank.
    living: Mapping[str, str] = field(default_factory=dict)
    # Ranks that others waited for earlier in the run.
    late: Sequence[Mapping[str, Any]] = ()
    # After a time-out: the first collective of each group that ranks disagree about; see `flight_recorder`.
    collectives: Sequence[str] = ()
    # Why the ranks' collectives weren't compared.
    uncompared: str | None = None
    # After a rank ran out of memory: the peak that a step was to have, and a change that lowers it.
    forecast: Mapping[str, Any] | None = None
    # None if it couldn't be written; `unsaved` says why.
    file: str | None = None
    unsaved: str | None = None

    def to_plain(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "first": self.first.to_plain(),
            "others": [other.to_plain() for other in self.others],
            "advice": _advice(self),
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> FailureReport:
        known = {key: value for key, value in plain.items() if key != "advice"}
        known["first"] = RankFailure.from_plain(plain["first"])
        known["others"] = tuple(RankFailure.from_plain(other) for other in plain["others"])
        known["collectives"] = tuple(plain.get("collectives") or ())
        return FailureReport(**known)


# The file


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
    compare_dumps: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> FailureReport:
    """Make the report of one attempt and write it. Takes seconds.

    Node 0 merges the statements of all nodes. Another node returns node 0's report; if that doesn't come, it makes one
    of what can be seen from its side of the cut.

    Args:
        exchange: None if no other process needs the report.
        exits: how ranks ended that weren't ended on purpose: rank, status (None: unknown), time, early.
        cause: sent to the other nodes.
        is_last: the run isn't restarted after this attempt.
        compare_dumps: calls `flight_recorder.compare_dumps` in a process that has torch.
    """
    own = monitor.statement({end["rank"]: end for end in exits})
    statements = [own]
    silent_nodes: list[RankFailure] = []
    if exchange is not None:
        if monitor.node > 0:
            zeros = exchange.await_report(own, cause=cause)
            if zeros is not None:
                return FailureReport.from_plain(zeros)
        statements, silent = exchange.gather(own, cause=cause)
        silent_nodes = [_unreachable(node, topology, run_dir, silent_s=exchange.silent_for(node)) for node in silent]
    report = make_report(statements, world_size=topology.world_size, attempt=attempt, silent_nodes=silent_nodes)

    failures = (report.first, *report.others)
    if topology.world_size > 1 and any(failure.may_disagree for failure in failures):
        prefix = str(run_dir.collectives_of(attempt=attempt))
        report = replace(report, **compare_dumps({"prefix": prefix, "world_size": topology.world_size}))

    file = run_dir.failure_of(node=monitor.node, attempt=attempt, is_last=is_last or report.first.is_final)
    report = replace(report, file=str(file), node=monitor.node)
    try:
        write_object(file, _masked(report.to_plain()))
    except OSError as error:
        # A full disk, which may be the very failure, or no run directory, which the rank that noticed it reports.
        unsaved = f"{file} can't be written: {error.strerror or error}."
        report = replace(report, file=None, unsaved=unsaved if run_dir.path.is_dir() else None)
    if exchange is not None and monitor.node == 0:
        exchange.publish(report.to_plain())
    return report


def add_forecast(report: FailureReport, forecast: Mapping[str, Any]) -> FailureReport:
    """Return the report with the forecast of the memory, and write its file again."""
    report = replace(report, forecast=forecast)
    if report.file is not None:
        write_object(Path(report.file), _masked(report.to_plain()))
    return report


def make_report(
    statements: Sequence[Mapping[str, Any]],
    *,
    world_size: int,
    attempt: int = 0,
    silent_nodes: Sequence[RankFailure] = (),
) -> FailureReport:
    """Return the report of what the nodes state; see `failure.find_first`."""
    verdict = find_first(statements, silent_nodes=silent_nodes)
    return FailureReport(
        world_size,
        verdict.first,
        verdict.others,
        attempt=attempt,
        living=verdict.living,
        late=verdict.late,
    )


def _unreachable(node: int, topology: Topology, run_dir: RunDir, *, silent_s: float) -> RankFailure:
    """Return the failure of a node that doesn't answer, under its first rank."""
    rank = topology.rank_of(node, 0)
    return RankFailure(
        rank,
        FailureKind.UNREACHABLE,
        node,
        time=time.time(),
        log=str(run_dir.rank_log(rank)),
        waited_s=silent_s,
    )


def _masked(value: Any) -> Any:
    """Return a report without the passwords in its messages, such as in the address of a server that didn't answer."""
    if isinstance(value, Mapping):
        return {name: _masked(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item) for item in value]
    if isinstance(value, str):
        return masked_text(value)
    return value


def _advice(report: FailureReport) -> str:
    return advice(report.first, world_size=report.world_size, disagree=bool(report.collectives))


# The text for the terminal


def render(report: FailureReport) -> str:
    """Return the text: a wrong request's message; for any other failure its message or traceback, then a panel.

    A report may be somebody else's: control characters are shown as text.
    """
    return shown("\n".join(_lines(report)))


def _lines(report: FailureReport) -> list[str]:
    first = report.first
    unsaved = []
    if report.unsaved is not None:
        unsaved.append(report.unsaved)
    message = first.exception if first.expected else first.traceback
    if first.expected and message is not None:
        says_everything = first.exit_status == EXIT_WRONG_REQUEST or report.world_size == 1
        if says_everything:
            return [message, *unsaved]

    lines = []
    if message is not None:
        lines += [message.rstrip(), ""]
    lines.append(_shortened(f"{_RULE} Rank {first.rank} of {report.world_size} {_what_happened(first)}"))
    lines += [_shortened(f"  {line}") for line in _also_failed(report)]
    for name, row in _rows(report):
        for number, line in enumerate(row):
            title = name if number == 0 else ""
            lines.append(f"  {title:<8} {line}")
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
    when = f"after step {step}" if step else "before its first step"
    return f"in {phase} {when}"


def _what_happened(first: RankFailure) -> str:
    """Return what the first rank did, without what stands above the panel."""
    if first.kind is FailureKind.UNREACHABLE:
        return f"is out of reach: {first.cause}"
    if first.expected:
        return f"(pid {first.pid}) failed first"
    # What compiled code said has a row of its own.
    cause = replace(first, said=None).cause.partition("\n")[0]
    if first.kind in (FailureKind.HUNG, FailureKind.STOPPED):
        return f"(pid {first.pid}) {cause}"
    return f"(pid {first.pid}) failed first: {cause}"


def _also_failed(report: FailureReport) -> Iterator[str]:
    """Yield a line for each other cause: ranks that failed by themselves before the first failure reached them."""
    causes: dict[str, list[int]] = {}
    for other in report.others:
        if _is_other_cause(other, report):
            causes.setdefault(other.cause.partition("\n")[0], []).append(other.rank)
    for cause, ranks in list(causes.items())[:_SHOWN_CAUSES]:
        yield f"{list_ranks(ranks).capitalize()} also failed: {cause}"
    if len(causes) > _SHOWN_CAUSES:
        yield f"and {len(causes) - _SHOWN_CAUSES} more, see the report"


def _rows(report: FailureReport) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the panel: a name, and lines of text."""
    first = report.first
    node = f"node {first.node}"
    if first.host:
        node += f" ({first.host})"
    if first.kind is FailureKind.UNREACHABLE:
        yield "where", _wrapped(node)
    else:
        place = f"{node}, {first.devices}, {_where(first.phase, step=first.step)}"
        if first.hook is not None:
            place += f", in {first.hook}"
        yield "where", _wrapped(place)

    consequences: dict[str, list[int]] = {}
    for other in report.others:
        if not _is_other_cause(other, report):
            consequences.setdefault(_consequence(other), []).append(other.rank)
    if consequences:
        others = [f"{list_ranks(ranks)} {consequence}" for consequence, ranks in consequences.items()]
        yield "others", _wrapped("; ".join(others))

    if first.said is not None:
        yield "printed", _wrapped(first.said)
    if first.stacks:
        # An exception's own stack is above; then this one shows where the rank hangs in closing.
        name = "closing" if first.kind is FailureKind.EXCEPTION else "stack"
        frames = list(main_stack(first.stacks))[:_SHOWN_FRAMES]
        yield name, [shown_frame(line) for line in frames]
    calls: list[str] = []
    for text in (*report.collectives, report.uncompared or ""):
        # The files of the user's project are shown as in the rows above.
        calls += _wrapped(text.replace(f"{Path.cwd()}/", ""))
    if calls:
        yield "calls", calls
    words = _advice(report)
    if first.memory is not None:
        yield from _memory_rows(first.memory)
    if report.forecast is not None:
        note = report.forecast["note"]
        yield "forecast", _wrapped(note or _forecast_in_words(report.forecast))
        change = report.forecast.get("change")
        if change is not None:
            words = f"{change['typed']}: forecast {format_binary_bytes(change['peak_bytes'])}."
    if words:
        yield "try", _wrapped(words)
    yield "log", [near(first.log)]
    if report.file is not None:
        yield "report", [near(report.file)]


def _memory_rows(memory: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    parts = _sizes(memory["by_category"])
    if memory["allocated_bytes"] is not None:
        allocated = format_binary_bytes(memory["allocated_bytes"])
        parts = f"{allocated} of {format_binary_bytes(memory['capacity_bytes'])}: {parts}"
    yield "memory", _wrapped(parts)
    lines = []
    for entry in memory["largest"]:
        lines.append(f"{format_binary_bytes(entry['size_bytes'])} {entry['category']} {entry['name']}".rstrip())
    if lines:
        yield "largest", lines
    if memory["snapshot"] is not None:
        yield "snapshot", [near(memory["snapshot"])]


def _forecast_in_words(forecast: Mapping[str, Any]) -> str:
    return f"{format_binary_bytes(forecast['peak_bytes'])} at the peak of a step: {_sizes(forecast['by_category'])}"


def _sizes(by_category: Mapping[str, int]) -> str:
    return ", ".join(f"{category} {format_binary_bytes(size)}" for category, size in by_category.items())


def _is_other_cause(other: RankFailure, report: FailureReport) -> bool:
    """Return True if a rank failed by itself, with another error than the first one."""
    is_same = other.kind is FailureKind.EXCEPTION and other.exception == report.first.exception
    return other.is_independent and not is_same


def _consequence(other: RankFailure) -> str:
    if other.kind in (FailureKind.HUNG, FailureKind.STOPPED):
        return f"didn't come either (in {other.phase})"
    if other.kind is FailureKind.UNREACHABLE:
        return other.cause
    if other.timed_out:
        return "timed out"
    if other.lost_peer:
        return "lost the connection"
    return "failed with the same error"


def list_ranks(numbers: Sequence[int], *, noun: str = "rank") -> str:
    """Return `rank 3` or `ranks 0–2, 5`, shortened."""
    title = f"{noun}s" if len(numbers) > 1 else noun
    return f"{title} {format_numbers(numbers, max_spans=_SHOWN_RANKS)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False)


def _shortened(line: str) -> str:
    if len(line) <= _WIDTH:
        return line
    return f"{line[: _WIDTH - 1].rstrip()}…"
