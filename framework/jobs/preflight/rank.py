"""The preflight on one rank: all checks in order, one result that every rank knows, and preflight.json."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

from framework.distributed.collectives import barrier, from_first, gather_to_first
from framework.distributed.process_group import process_group, set_timeout
from framework.errors import PreflightError
from framework.jobs.preflight.checks import (
    BUS_TURNS,
    Link,
    connect_peers,
    max_over_ranks,
    measure_exchange,
    measure_links,
    measure_matmul,
    time_barriers,
)
from framework.jobs.preflight.machine import buffer_limit, facts
from framework.jobs.preflight.report import BETWEEN, RESULT, WITHIN, assess, slowest_lines, verdict
from framework.launch.plan import MonitorLink, RankArguments
from framework.monitoring.rank_status import Phase
from framework.system.run_dir import write_atomically
from framework.training.rank_setup import RankSetup, setup_rank

_ALONE_S, _BEFORE_TRAINING_S = 20.0, 2.0  # defaults of preflight.seconds
_LINKS_SHARE, _EXCHANGES_SHARE, _MATMUL_SHARE = 0.25, 0.7, 0.05


def preflight_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Write preflight.json in the run directory. Raises FrameworkError.

    If a rank doesn't answer within backend.timeout, the others raise RunError with the name of the check.
    """
    with setup_rank(arguments, link) as rank:
        link.rank_status.set_phase(Phase.MEETING)
        backend = rank.config.backend
        with process_group(rank.context, backend, rendezvous=arguments.rendezvous):
            set_timeout(backend.timeout, rank.context)
            result = _run_checks(rank, seconds=rank.config.preflight.seconds or _ALONE_S, timeout_s=backend.timeout)
            link.rank_status.set_phase(Phase.CLOSING)
            if rank.context.is_main:
                rank.run_dir.update_run({"results": {"passed": result["passed"]}})


def before_training(rank: RankSetup) -> None:
    """If `preflight.enabled`, run the checks in about two seconds and print two lines. Every rank must call it.

    Raises PreflightError on every rank if a check failed.
    """
    settings, backend = rank.config.preflight, rank.config.backend
    if not settings.enabled:
        return
    result = _run_checks(rank, seconds=settings.seconds or _BEFORE_TRAINING_S, timeout_s=backend.init_timeout)
    if rank.context.is_main:
        print(verdict(result).partition("\n")[0], flush=True)
        print("; ".join(slowest_lines(result)) or "one device, no link", flush=True)
    if not result["passed"]:
        where = rank.run_dir.path / RESULT
        raise PreflightError(f"{verdict(result)}\nNothing was trained. All measurements: {where}")


def _run_checks(rank: RankSetup, *, seconds: float, timeout_s: float) -> dict[str, Any]:
    """Check, measure, assess and write. Return the result, the same on every rank."""
    settings, context = rank.config.preflight, rank.context
    rank.link.rank_status.set_phase(Phase.PREFLIGHT)
    began, exchanges, links = time.perf_counter(), list[dict[str, Any]](), list[Link]()
    with connect_peers(context, timeout_s=timeout_s) as peers:
        with peers.check("facts"):
            own = facts(rank.config, context, rank.run_dir)
            max_bytes = max(4, int(min(settings.max_bytes, -max_over_ranks(-buffer_limit(context), context))))
        waits_s, times = time_barriers(peers)
        if context.world_size > 1:
            links = measure_links(peers, max_bytes=max_bytes, seconds=_LINKS_SHARE * seconds)
            share_s = _EXCHANGES_SHARE * seconds / len(BUS_TURNS)
            exchanges = [measure_exchange(name, peers, max_bytes=max_bytes, seconds=share_s) for name in BUS_TURNS]
        own["matmul"] = measure_matmul(peers, seconds=_MATMUL_SHARE * seconds)
    took_s = max_over_ranks(time.perf_counter() - began, context)
    # Rank 0 alone gets the findings of all: with thousands of ranks, they are large.
    every = gather_to_first((own, waits_s, times, links, peers.faults), context)
    result: dict[str, Any] | None = None
    if every is not None:
        ranks, waits, all_times, all_links, faults = zip(*every, strict=True)
        nnodes, procs = context.topology.nnodes, context.topology.procs_per_node
        for each, own_waits_s, clock in zip(ranks, waits, clock_offsets(waits, all_times), strict=True):
            each |= {"barrier_s": median(own_waits_s), "clock": clock}
        result = {
            "recipe": rank.config.recipe,
            "backend": context.backend,
            "seconds": seconds,
            "took_s": took_s,
            "max_bytes": max_bytes,
            "ranks": list(ranks),
            "links": sorted(chain.from_iterable(all_links), key=lambda link: link["ranks"]),
            "num_links": {
                WITHIN: nnodes * procs * (procs - 1) // 2,
                BETWEEN: procs * nnodes * (nnodes - 1) // 2,
            },
            "checks": exchanges,
            "faults": list(chain.from_iterable(faults)),
        }
        result |= assess(result, settings)
    result = from_first(result, context)
    assert result is not None
    _write(rank, result)
    return result


def clock_offsets(waits: Sequence[Sequence[float]], times: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Return by how many seconds each rank's clock is ahead of rank 0's (ahead_s), and the error of that (error_s).

    No rank leaves a barrier before the last one enters it, so two ranks leave it at most the longer of their waits
    apart. The shortest barrier gives the tightest bound.

    Args:
        waits: of each rank, how long each barrier took.
        times: of each rank, the time of day at the end of each barrier.
    """
    found = []
    for own_waits, own_times in zip(waits, times, strict=True):
        barriers = zip(own_waits, waits[0], own_times, times[0], strict=True)
        error_s, ahead_s = min((max(own_s, first_s), own - first) for own_s, first_s, own, first in barriers)
        found.append({"ahead_s": ahead_s, "error_s": error_s})
    return found


def _write(rank: RankSetup, result: dict[str, Any]) -> None:
    """Write preflight.json on rank 0, and on the first rank of each node that doesn't share rank 0's disk."""
    file, content = rank.run_dir.path / RESULT, json.dumps(result, indent=2) + "\n"
    if rank.context.is_main:
        write_atomically(file, content)
    barrier(rank.context)
    if rank.context.local_rank == 0 and not file.exists():
        write_atomically(file, content)
