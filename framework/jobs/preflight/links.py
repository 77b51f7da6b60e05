"""Links between pairs of ranks: who is measured with whom, and the latency and bandwidth of each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import combinations, zip_longest
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from framework.jobs.preflight.peers import Peers, max_over_ranks, sent_values
from framework.jobs.preflight.report import BETWEEN, WITHIN

# Round trips of each pair with a small message.
NUM_TRIPS = 10
# Rounds of links that are measured however little time is left.
LEAST_ROUNDS = 16

# Round trips with a large message, and its size.
_NUM_LARGE_TRIPS = 3
_LARGE_BYTES = 2**22

# Two ranks.
Pair = tuple[int, int]
# As in preflight.json.
Link = dict[str, Any]


def measure_links(peers: Peers, *, max_bytes: int, seconds: float) -> list[Link]:
    """Measure links within and between nodes by turns, for about `seconds`; all ranks end after the same round.

    Return the links that this rank timed. Every rank must call it.
    """
    context = peers.context
    began = time.perf_counter()
    within, between = link_rounds(context.topology.nnodes, context.topology.procs_per_node)
    rounds = list[list[Pair]]()
    for pairs_of_kinds in zip_longest(within, between):
        rounds += [pairs for pairs in pairs_of_kinds if pairs is not None]

    links = list[Link]()
    with peers.check("ping-pong"):
        for num_rounds, pairs in enumerate(rounds, start=1):
            for pair in pairs:
                if context.rank not in pair:
                    continue
                link = _exchange_messages(pair, peers, max_bytes=max_bytes)
                # Both ranks timed it; the first one's times are the link's.
                if context.rank == pair[0]:
                    links.append(link)
            # All ranks wait here.
            spent_s = max_over_ranks(time.perf_counter() - began, context)
            expected_s = spent_s * (num_rounds + 1) / num_rounds
            if num_rounds >= LEAST_ROUNDS and expected_s > seconds:
                break
    return links


def link_rounds(nnodes: int, procs: int) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return the rounds of pairs within nodes, and between nodes for ranks of the same local rank.

    The pairs of a round are measured at the same time, so they share nothing.
    """
    return _rounds_within_nodes(nnodes, procs), _rounds_between_nodes(nnodes, procs)


def _rounds_within_nodes(nnodes: int, procs: int) -> list[list[Pair]]:
    """Let each node have one pair in a round: pairs of a node share its memory and cores."""
    rounds = []
    for one, other in combinations(range(procs), 2):
        rounds.append([(node * procs + one, node * procs + other) for node in range(nnodes)])
    return rounds


def _rounds_between_nodes(nnodes: int, procs: int) -> list[list[Pair]]:
    """Let each node be in one pair of a round: pairs of a node share its network card.

    The local rank changes from round to round, so that all cards of a node are used early.
    """
    rounds = []
    for turn in range(procs):
        for index, pairs_of_nodes in enumerate(_round_robin(nnodes)):
            local_rank = (index + turn) % procs
            rounds.append([(one * procs + local_rank, other * procs + local_rank) for one, other in pairs_of_nodes])
    return rounds


def _round_robin(number: int) -> Iterator[list[Pair]]:
    """Pair each of `number` once with each other, in rounds in which none is in two pairs: the circle method.

    The first keeps its place, all others move on after each round; opposites are pairs.
    https://en.wikipedia.org/wiki/Round-robin_tournament
    """
    if number < 2:
        return
    # If the number is odd, there is a dummy, and whoever is paired with it rests.
    circle = list(range(number + number % 2))
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = []
        for one, other in zip(circle[:half], reversed(circle[half:]), strict=True):
            if max(one, other) < number:
                pairs.append((min(one, other), max(one, other)))
        yield pairs
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _exchange_messages(pair: Pair, peers: Peers, *, max_bytes: int) -> Link:
    """Send small messages and a few large ones there and back; check and time them."""
    context = peers.context
    rank = context.rank
    is_first = rank == pair[0]
    other_rank = pair[1] if is_first else pair[0]
    count = math.ceil(min(_LARGE_BYTES, max_bytes) / 4)
    sent = sent_values([rank], count, device=peers.device)
    expected = sent_values([other_rank], count, device=peers.device)
    received = torch.zeros_like(expected)

    def round_trip(count: int) -> float:
        began = time.perf_counter()
        if is_first:
            dist.send(sent[:count], other_rank, group=peers.group)
        dist.recv(received[:count], other_rank, group=peers.group)
        if not is_first:
            dist.send(sent[:count], other_rank, group=peers.group)
        context.wait_for_devices()
        return time.perf_counter() - began

    # The first one opens the connection.
    round_trip(1)
    trips_s = [round_trip(1) for _ in range(NUM_TRIPS)]
    # The shortest one: something else may have disturbed the others.
    large_trip_s = min(round_trip(count) for _ in range(_NUM_LARGE_TRIPS))
    peers.compare(received, expected, label=f"from rank {other_rank}: ")

    nodes = [rank // context.topology.procs_per_node for rank in pair]
    size_bytes = 4 * count
    return {
        "ranks": list(pair),
        "nodes": nodes,
        "kind": WITHIN if nodes[0] == nodes[1] else BETWEEN,
        "round_trips_s": trips_s,
        "latency_s": median(trips_s) / 2,
        "bytes": size_bytes,
        "bytes_per_s": 2 * size_bytes / large_trip_s,
    }
