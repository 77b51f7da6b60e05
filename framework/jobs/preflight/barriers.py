"""How long a barrier takes, and what barriers tell about the clocks of the ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from framework.distributed.collectives import barrier
from framework.jobs.preflight.peers import Peers

NUM_BARRIERS = 20


class Barrier(NamedTuple):
    """A barrier as one rank saw it."""

    wait_s: float
    # The time of day, by this rank's clock, when the rank left the barrier.
    left_at_s: float


def time_barriers(peers: Peers) -> list[Barrier]:
    """Time barriers. Every rank must call it."""
    context = peers.context
    barriers = list[Barrier]()
    with peers.check("barrier"):
        # The first one opens connections.
        barrier(context)
        for _ in range(NUM_BARRIERS):
            context.wait_for_devices()
            began = time.perf_counter()
            barrier(context)
            context.wait_for_devices()
            barriers.append(Barrier(wait_s=time.perf_counter() - began, left_at_s=time.time()))
    return barriers


def clock_offsets(barriers: Sequence[Sequence[Barrier]]) -> list[dict[str, float]]:
    """Return by how many seconds each rank's clock is ahead of rank 0's (ahead_s), and the error of that (error_s).

    No rank leaves a barrier before the last one enters it, so two ranks leave it at most the longer of their waits
    apart. The shortest barrier gives the tightest bound.

    Args:
        barriers: those of each rank; all ranks have the same number.
    """
    offsets = []
    for own_barriers in barriers:
        bounds = []
        for own, of_rank_0 in zip(own_barriers, barriers[0], strict=True):
            error_s = max(own.wait_s, of_rank_0.wait_s)
            bounds.append((error_s, own.left_at_s - of_rank_0.left_at_s))
        error_s, ahead_s = min(bounds)
        offsets.append({"ahead_s": ahead_s, "error_s": error_s})
    return offsets
