"""The preflight on one rank: everything in order, one result that every rank knows, and preflight.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from framework.config.schema import PreflightConfig
from framework.distributed.collectives import barrier, gather_to_all
from framework.distributed.group import process_group, set_timeout
from framework.errors import RunError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.preflight.arithmetic import Budget, lateness, sizes
from framework.preflight.assessing import assess
from framework.preflight.exchanges import EXCHANGES, measure
from framework.preflight.facts import facts
from framework.preflight.lines import Lines, greatest, open_lines
from framework.preflight.links import measure_links
from framework.preflight.order import late_sender, matmuls, ordered
from framework.preflight.wording import amount, device_line, link_line, verdict, verdict_line
from framework.pulse import Phase
from framework.run_dir import write_atomically
from framework.session import Rank, entered

RESULT = "preflight.json"

_ALONE_S = 20.0  # where preflight.seconds says nothing
_BEFORE_TRAINING_S = 2.0
_MATMUL_SHARE, _LINKS_SHARE = 0.05, 0.3


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

    Raises RunError on every rank, with what failed, so that nothing is trained.
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
        raise RunError(f"{verdict(result)}\nNothing was trained. All that was measured: {rank.run_dir.path / RESULT}")


@dataclass
class Own:
    """What this rank found."""

    turn: dict[str, Any]
    faults: list[tuple[str, str]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=lambda: {"ahead_s": 0.0, "error_s": 0.0})
    late: dict[str, Any] | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)  # the same on every rank
    matmul: list[dict[str, Any]] = field(default_factory=list)

    def note(self, check: str, faults: Sequence[str]) -> None:
        self.faults += [(check, text) for text in faults]


def _checked(rank: Rank, *, seconds: float, timeout_s: float) -> dict[str, Any]:
    """Check, measure, assess and write; gives the result, the same on every rank."""
    settings, context = rank.config.preflight, rank.context
    began = time.perf_counter()
    lines = open_lines(context, timeout_s=timeout_s)
    all_facts = gather_to_all(facts(rank.config, context, rank.run_dir), context)
    limit = size_limit(all_facts, settings)
    turn, faults = ordered(lines)
    own = Own(turn)
    own.note("barrier", faults)
    if lines.ranks > 1:
        _exchange(lines, own, seconds=(1 - _MATMUL_SHARE) * seconds, max_bytes=limit["max_bytes"])
    own.matmul, faults = matmuls(lines, seconds=_MATMUL_SHARE * seconds)
    own.note("matmul", faults)
    (took_s,) = greatest([time.perf_counter() - began], context)
    found: dict[str, Any] = {
        "recipe": rank.config.recipe,
        "backend": context.backend,
        "seconds": seconds,
        "took_s": took_s,
        "sizes": limit,
        "checks": own.checks,
        **_together(all_facts, gather_to_all(own, context)),
    }
    result = {**found, **assess(found, settings)}
    _write(rank, result)
    return result


def _exchange(lines: Lines, own: Own, *, seconds: float, max_bytes: int) -> None:
    """All that takes two: links first, since they are what all else is made of."""
    began, budget = time.perf_counter(), Budget(seconds)
    links = measure_links(lines, max_bytes=max_bytes, seconds=_LINKS_SHARE * seconds)
    own.links, own.clock = links.links, links.clock
    own.note("ping-pong", links.faults)
    own.late, faults = late_sender(lines)
    own.note("isend/irecv", faults)
    budget.spend(greatest([time.perf_counter() - began], lines.context)[0])
    for number, exchange in enumerate(EXCHANGES):
        share_s = budget.share(len(EXCHANGES) - number)
        measured = measure(exchange, lines, sizes(max_bytes), seconds=share_s)
        budget.spend(measured.spent_s)
        own.checks.append(measured.of_all)
        own.note(exchange.name, measured.faults)


def size_limit(all_facts: Sequence[Mapping[str, Any]], settings: PreflightConfig) -> dict[str, Any]:
    """The greatest exchange: max_bytes, and what limited it beyond preflight.max_bytes, None for nothing."""
    where = min(
        (each for each in all_facts if each["room_bytes"] is not None),
        key=lambda each: each["room_bytes"],
        default=None,
    )
    if where is None or where["room_bytes"] >= settings.max_bytes:
        return {"max_bytes": settings.max_bytes, "limited_by": None}
    room = where["room_bytes"]
    text = f"the free memory of rank {where['rank']} ({where['host']}) leaves {amount(room)} for a buffer"
    return {"max_bytes": max(room, 4), "limited_by": text}


def _together(all_facts: Sequence[Mapping[str, Any]], all_own: Sequence[Own]) -> dict[str, Any]:
    """What all ranks found, in the form of preflight.json."""
    late = lateness([own.turn["waits_s"] for own in all_own])
    ranks = [
        {
            **{key: value for key, value in facts.items() if key not in ("room_bytes", "interconnect")},
            "clock": own.clock,
            "matmul": own.matmul,
            "turn": own.turn["number"],
            "barrier_s": median(own.turn["waits_s"]),
            "late_s": late_s,
            "late_sender": own.late,
        }
        for facts, own, late_s in zip(all_facts, all_own, late, strict=True)
    ]
    links = [_placed(link, ranks) for own in all_own for link in own.links]
    faults = [
        {"check": check, "rank": rank, "text": text} for rank, own in enumerate(all_own) for check, text in own.faults
    ]
    topologies = {str(each["node"]): each["interconnect"] for each in all_facts if each["interconnect"] is not None}
    return {"ranks": ranks, "interconnects": topologies, "links": links, "faults": faults}


def _placed(link: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    one, other = (ranks[number]["node"] for number in link["ranks"])
    return {**link, "nodes": [one, other], "is_within_node": one == other}


def _write(rank: Rank, result: dict[str, Any]) -> None:
    """By rank 0; on a node that doesn't see its file, since the disk isn't shared, by the first rank there."""
    file = rank.run_dir.path / RESULT
    text = json.dumps(result, indent=2) + "\n"
    if rank.context.is_main:
        write_atomically(file, text)
    barrier(rank.context)
    if rank.context.local_rank == 0 and not file.exists():
        write_atomically(file, text)
