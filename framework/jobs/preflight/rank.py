"""The preflight on one rank: facts, barriers, links, exchanges of growing size, matmul; one result that all ranks know.

Each kind of check is a module of this folder; values are checked first, then times are measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from framework.config.schema import Config
from framework.distributed.collectives import barrier, gather_to_all
from framework.distributed.context import Context
from framework.distributed.process_group import process_group, set_timeout
from framework.engine.setup import RankSetup, setup_rank
from framework.errors import PreflightError
from framework.jobs.preflight.barriers import Barrier, clock_offsets, time_barriers
from framework.jobs.preflight.exchanges import BUS_TURNS, measure_exchange
from framework.jobs.preflight.links import Link, link_rounds, measure_links
from framework.jobs.preflight.machine import buffer_limit, facts, measure_matmul
from framework.jobs.preflight.peers import Peers, connect_peers, max_over_ranks
from framework.jobs.preflight.report import BETWEEN, RESULT, WITHIN, assess, slowest_lines, verdict
from framework.launch.plan import MonitorLink, RankArguments
from framework.monitoring.rank_status import RankPhase
from framework.system.run_dir import write_object

# The defaults of preflight.seconds.
_ALONE_S = 20.0
_BEFORE_TRAINING_S = 2.0
# Parts of preflight.seconds.
_LINKS_SHARE = 0.25
_EXCHANGES_SHARE = 0.7
_MATMUL_SHARE = 0.05


def preflight_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Write preflight.json in the run directory. Raises FrameworkError.

    If a rank doesn't answer within backend.timeout, the others raise RunError with the name of the check.
    """
    with setup_rank(arguments, link) as setup:
        link.rank_status.set_phase(RankPhase.MEETING)
        backend = setup.config.backend
        with process_group(setup.context, backend, rendezvous=arguments.rendezvous), link.recording():
            set_timeout(backend.timeout, setup.context)
            seconds = setup.config.preflight.seconds or _ALONE_S
            result = _run_checks(setup, seconds=seconds, timeout_s=backend.timeout)
            link.rank_status.set_phase(RankPhase.CLOSING)
            if setup.context.is_main:
                setup.run_dir.update_run({"results": {"passed": result["passed"]}})


def before_training(setup: RankSetup) -> None:
    """If `preflight.enabled`, run the checks in about two seconds and print two lines. Every rank must call it.

    Raises PreflightError on every rank if a check failed.
    """
    settings = setup.config.preflight
    if not settings.enabled:
        return
    seconds = settings.seconds or _BEFORE_TRAINING_S
    result = _run_checks(setup, seconds=seconds, timeout_s=setup.config.backend.init_timeout)
    if setup.context.is_main:
        first_line = verdict(result).partition("\n")[0]
        print(first_line, flush=True)
        print("; ".join(slowest_lines(result)) or "one device, no link", flush=True)
    if not result["passed"]:
        path = setup.run_dir.path / RESULT
        raise PreflightError(f"{verdict(result)}\nNothing was trained. All measurements: {path}")


def _run_checks(setup: RankSetup, *, seconds: float, timeout_s: float) -> dict[str, Any]:
    """Check, measure, assess and write. Return the result, the same on every rank."""
    context = setup.context
    setup.link.rank_status.set_phase(RankPhase.PREFLIGHT)
    began = time.perf_counter()
    with connect_peers(context, timeout_s=timeout_s) as peers:
        measured = _measure(setup, peers, seconds=seconds)
    took_s = max_over_ranks(time.perf_counter() - began, context)

    every_rank = gather_to_all(measured, context)
    result = {
        "recipe": setup.config.recipe,
        "backend": context.backend,
        "seconds": seconds,
        "took_s": took_s,
        **_combine(every_rank, context),
    }
    result |= assess(result, setup.config.preflight)
    _write(result, setup.run_dir.path / RESULT, context)
    return result


@dataclass
class _Measured:
    """What one rank measured."""

    facts: dict[str, Any]
    barriers: list[Barrier]
    # Those that this rank timed.
    links: list[Link]
    # What this rank found wrong.
    faults: list[dict[str, Any]]
    # The same on every rank.
    max_bytes: int
    exchanges: list[dict[str, Any]]


def _measure(setup: RankSetup, peers: Peers, *, seconds: float) -> _Measured:
    """Run every check. Every rank must call it."""
    context = setup.context
    with peers.check("facts"):
        own_facts = facts(setup.config, context, setup.run_dir)
        max_bytes = _largest_buffer(setup.config, context)
    barriers = time_barriers(peers)

    links = list[Link]()
    exchanges = []
    if context.world_size > 1:
        links = measure_links(peers, max_bytes=max_bytes, seconds=_LINKS_SHARE * seconds)
        share_s = _EXCHANGES_SHARE * seconds / len(BUS_TURNS)
        for name in BUS_TURNS:
            exchanges.append(measure_exchange(name, peers, max_bytes=max_bytes, seconds=share_s))

    own_facts["matmul"] = measure_matmul(peers, seconds=_MATMUL_SHARE * seconds)
    return _Measured(own_facts, barriers, links, peers.faults, max_bytes, exchanges)


def _largest_buffer(config: Config, context: Context) -> int:
    """Return the bytes of the largest buffer, the same on every rank: what is asked for, if it fits everywhere."""
    fits_everywhere = -max_over_ranks(-buffer_limit(context), context)
    return max(4, int(min(config.preflight.max_bytes, fits_everywhere)))


def _combine(every_rank: Sequence[_Measured], context: Context) -> dict[str, Any]:
    """Return what all ranks measured, in their order, as preflight.json has it."""
    clocks = clock_offsets([measured.barriers for measured in every_rank])
    ranks = []
    links = list[Link]()
    faults = []
    for measured, clock in zip(every_rank, clocks, strict=True):
        barrier_s = median(timed.wait_s for timed in measured.barriers)
        ranks.append({**measured.facts, "barrier_s": barrier_s, "clock": clock})
        links += measured.links
        faults += measured.faults
    links.sort(key=lambda link: link["ranks"])

    within, between = link_rounds(context.topology.nnodes, context.topology.procs_per_node)
    return {
        "max_bytes": every_rank[0].max_bytes,
        "ranks": ranks,
        "links": links,
        "num_links": {WITHIN: sum(map(len, within)), BETWEEN: sum(map(len, between))},
        "checks": every_rank[0].exchanges,
        "faults": faults,
    }


def _write(result: dict[str, Any], path: Path, context: Context) -> None:
    """Write preflight.json on every node. Every rank must call it."""
    if context.is_main:
        write_object(path, result)
    barrier(context)
    # A node may share rank 0's disk, or have one of its own.
    if context.local_rank == 0 and not path.exists():
        write_object(path, result)
