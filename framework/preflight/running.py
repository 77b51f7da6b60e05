"""The preflight on one rank: everything in order, one result that every rank knows, and preflight.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from framework.config.schema import PreflightConfig
from framework.distributed.collectives import barrier, from_first, gather_to_all, gather_to_first
from framework.distributed.group import process_group, set_timeout
from framework.errors import PreflightError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.preflight.arithmetic import Budget, compared, lateness, sizes
from framework.preflight.assessing import assess
from framework.preflight.exchanges import EXCHANGES, measure
from framework.preflight.facts import facts
from framework.preflight.lines import Lines, greatest, open_lines, under_way
from framework.preflight.links import measure_links
from framework.preflight.order import late_sender, matmuls, ordered
from framework.preflight.pairing import kinds
from framework.preflight.wording import amount, device_line, link_line, verdict, verdict_line
from framework.pulse import Phase
from framework.run_dir import write_atomically
from framework.session import Rank, entered
from framework.topology import Topology

RESULT = "preflight.json"

_ALONE_S = 20.0  # where preflight.seconds says nothing
_BEFORE_TRAINING_S = 2.0
_MATMUL_SHARE, _LINKS_SHARE = 0.05, 0.3
_NOTED = 20  # faults of a check on one rank


def preflight_rank(arguments: RankArguments, link: Link) -> None:
    """`job=preflight`: leaves preflight.json in the run directory, whether or not all is well. Raises FrameworkError.

    Where a rank doesn't answer within backend.timeout, the others raise RunError with the name of the check.
    """
    with entered(arguments, link) as rank:
        link.pulse.at(Phase.MEETING)
        backend = rank.config.backend
        with process_group(rank.context, backend, rendezvous=arguments.rendezvous):
            set_timeout(backend.timeout, rank.context)
            result = _checked(rank, seconds=rank.config.preflight.seconds or _ALONE_S, timeout_s=backend.timeout)
            link.pulse.at(Phase.CLOSING)
            if rank.context.is_main:
                rank.run_dir.update_run({"results": {"passed": result["passed"]}})


def before_training(rank: Rank) -> None:
    """With `preflight=true` the same in about two seconds, told in two lines; every rank must call it.

    Raises PreflightError on every rank, with what failed, so that nothing is trained.
    """
    settings, backend = rank.config.preflight, rank.config.backend
    if not settings.enabled:
        return
    result = _checked(rank, seconds=settings.seconds or _BEFORE_TRAINING_S, timeout_s=backend.init_timeout)
    if rank.context.is_main:
        told = (link_line(result), device_line(result))
        print(verdict_line(result), flush=True)
        print("; ".join(line for line in told if line is not None) or "one device, no link", flush=True)
    if not result["passed"]:
        where = rank.run_dir.path / RESULT
        raise PreflightError(f"{verdict(result)}\nNothing was trained. All that was measured: {where}")


@dataclass
class Own:
    """What this rank found, but for `checks`, which are the same on every rank."""

    facts: dict[str, Any]
    turn: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=lambda: {"ahead_s": 0.0, "error_s": 0.0})
    late: dict[str, Any] | None = None
    matmul: list[dict[str, Any]] = field(default_factory=list)

    def note(self, check: str, faults: Sequence[str]) -> None:
        """The first of them; rank 0 gets them of all ranks."""
        self.faults += [(check, text) for text in faults[:_NOTED]]
        if len(faults) > _NOTED:
            self.faults.append((check, f"and {len(faults) - _NOTED} more like these"))


def _checked(rank: Rank, *, seconds: float, timeout_s: float) -> dict[str, Any]:
    """Check, measure, assess and write; gives the result, the same on every rank."""
    settings, context = rank.config.preflight, rank.context
    rank.link.pulse.at(Phase.PREFLIGHT)
    began = time.perf_counter()
    with open_lines(context, timeout_s=timeout_s) as lines:
        with under_way("facts", context):
            own = Own(facts(rank.config, context, rank.run_dir))
            room_bytes = own.facts.pop("room_bytes")
            limit = size_limit(gather_to_all(Room(context.rank, own.facts["host"], room_bytes), context), settings)
        own.turn, faults = ordered(lines)
        own.note("barrier", faults)
        checks: list[dict[str, Any]] = []
        if lines.ranks > 1:
            share_s = (1 - _MATMUL_SHARE) * seconds
            checks = _exchange(lines, own, seconds=share_s, max_bytes=limit["max_bytes"], timeout_s=timeout_s)
        own.matmul, faults = matmuls(lines, seconds=_MATMUL_SHARE * seconds)
        own.note("matmul", faults)
    (took_s,) = greatest([time.perf_counter() - began], context)
    # To one rank, which tells the others what came of it: with thousands each would have all that all have found.
    all_own = gather_to_first(own, context)
    result: dict[str, Any] | None = None
    if all_own is not None:
        found = {
            "recipe": rank.config.recipe,
            "backend": context.backend,
            "seconds": seconds,
            "took_s": took_s,
            "sizes": limit,
            "checks": checks,
            **together(all_own, context.topology),
        }
        result = {**found, **assess(found, settings)}
    told: dict[str, Any] = from_first(result, context)
    _write(rank, told)
    return told


def _exchange(lines: Lines, own: Own, *, seconds: float, max_bytes: int, timeout_s: float) -> list[dict[str, Any]]:
    """All that takes two: links first, since they are what all else is made of. Gives the checks of exchanges."""
    began, budget, checks = time.perf_counter(), Budget(seconds), list[dict[str, Any]]()
    links = measure_links(lines, max_bytes=max_bytes, seconds=_LINKS_SHARE * seconds)
    own.links, own.clock = links.links, links.clock
    own.note("ping-pong", links.faults)
    own.late, faults = late_sender(lines, timeout_s=timeout_s)
    own.note("isend/irecv", faults)
    budget.spend(greatest([time.perf_counter() - began], lines.context)[0])
    for number, exchange in enumerate(EXCHANGES):
        share_s = budget.share(len(EXCHANGES) - number)
        measured = measure(exchange, lines, sizes(max_bytes), seconds=share_s)
        budget.spend(measured.spent_s)
        checks.append(measured.of_all)
        own.note(exchange.name, measured.faults)
    return checks


class Room(NamedTuple):
    """How large one exchange may be on this rank, None where that isn't known."""

    rank: int
    host: str
    size_bytes: int | None


def size_limit(rooms: Sequence[Room], settings: PreflightConfig) -> dict[str, Any]:
    """The greatest exchange: max_bytes, and what limited it beyond preflight.max_bytes, None for nothing."""
    known = [(each.size_bytes, each) for each in rooms if each.size_bytes is not None]
    if not known or min(known)[0] >= settings.max_bytes:
        return {"max_bytes": settings.max_bytes, "limited_by": None}
    size_bytes, where = min(known)
    text = f"the free memory of rank {where.rank} ({where.host}) leaves {amount(size_bytes)} for a buffer"
    return {"max_bytes": max(size_bytes, 4), "limited_by": text}


def together(all_own: Sequence[Own], topology: Topology) -> dict[str, Any]:
    """What all ranks found, in the form of preflight.json: ranks, links, num_links, faults and interconnects."""
    late = lateness([own.turn["waits_s"] for own in all_own])
    firsts = all_own[:: topology.procs_per_node]
    ranks = [
        {
            **{key: value for key, value in own.facts.items() if key != "interconnect"},
            "clock": firsts[own.facts["node"]].clock,
            "matmul": own.matmul,
            "turn": own.turn["number"],
            "barrier_s": median(own.turn["waits_s"]),
            "late_s": late_s,
            "late_sender": own.late,
        }
        for own, late_s in zip(all_own, late, strict=True)
    ]
    links = sorted((_placed(link, ranks) for own in all_own for link in own.links), key=lambda link: link["ranks"])
    faults = [
        {"check": check, "rank": rank, "text": text} for rank, own in enumerate(all_own) for check, text in own.faults
    ]
    shown = {str(own.facts["node"]): own.facts["interconnect"] for own in firsts}
    numbers = {kind.is_within_node: kind.num_links for kind in kinds(topology.nnodes, topology.procs_per_node)}
    return {
        "ranks": ranks,
        "interconnects": {node: text for node, text in shown.items() if text is not None},
        "links": compared(links),
        "num_links": {"within_node": numbers.get(True, 0), "between_nodes": numbers.get(False, 0)},
        "faults": faults,
    }


def _placed(link: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    one, other = (ranks[number]["node"] for number in link["ranks"])
    return {**link, "nodes": [one, other], "is_within_node": one == other}


def _write(rank: Rank, result: dict[str, Any]) -> None:
    """By rank 0; on a node that doesn't see its file, since the disk isn't shared, by the first rank there."""
    file = rank.run_dir.path / RESULT
    if rank.context.is_main:
        write_atomically(file, _text(result))
    barrier(rank.context)
    if rank.context.local_rank == 0 and not file.exists():
        write_atomically(file, _text(result))


def _text(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=2) + "\n"
