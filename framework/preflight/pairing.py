"""Which pairs of ranks are measured at the same time, and in which order. No torch.

Within a node one pair at a time, since they share its memory and cores; on all nodes at once, since those share nothing
then. Between nodes each node is in one pair at a time, so that nobody shares its card: a tournament in rounds. Whenever
it is ended, each node has been in as many pairs as any other, or in one fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

Pair = tuple[int, int]


class Kind(NamedTuple):
    """Links that are compared with one another. steps: gives the pairs of each step, which are disjoint.

    num_links, num_steps: in all of it.
    """

    is_within_node: bool
    num_links: int
    num_steps: int
    steps: Callable[[], Iterator[list[Pair]]]


def rounds(number: int) -> Iterator[list[Pair]]:
    """Each of `number` with each other once, in rounds in which nobody is in two pairs; the lower one first.

    The circle method: the first keeps its place, all others move on by one after each round, and who are opposite are a
    pair. Of an odd number one rests in each round. https://en.wikipedia.org/wiki/Round-robin_tournament
    """
    circle: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    half = len(circle) // 2
    for _ in circle[1:]:
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(one, other), max(one, other)) for one, other in opposite if one is not None and other is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def kinds(nnodes: int, procs_per_node: int) -> list[Kind]:
    """What there is to measure: every pair of a node; and of each two nodes the ranks with the same local rank."""
    nodes, procs = range(nnodes), procs_per_node
    in_one = list(_pairs(procs))
    within = Kind(
        is_within_node=True,
        num_links=nnodes * len(in_one),
        num_steps=len(in_one),
        steps=lambda: ([(node * procs + a, node * procs + b) for node in nodes] for a, b in in_one),
    )
    between = Kind(
        is_within_node=False,
        num_links=procs * nnodes * (nnodes - 1) // 2,
        num_steps=procs * max(nnodes - 1 + nnodes % 2, 0) if nnodes > 1 else 0,
        steps=lambda: _between(nnodes, procs),
    )
    return [kind for kind in (within, between) if kind.num_links]


def leader(pair: Pair) -> int:
    """Who takes the time and keeps it: either half of all pairs, so that no rank has many more to keep than others."""
    return pair[sum(pair) % 2]


def doublings(number: int) -> Iterator[list[Pair]]:
    """From the first to all, in steps: whoever has been reached reaches one more, who comes second in the pair."""
    reached = 1
    while reached < number:
        yield [(one, one + reached) for one in range(min(reached, number - reached))]
        reached *= 2


def _pairs(number: int) -> Iterator[Pair]:
    for each in rounds(number):
        yield from each


def _between(nnodes: int, procs: int) -> Iterator[list[Pair]]:
    """Round after round with another local rank, so that the cards of all of them are used early; then again."""
    for turn in range(procs):
        for number, each in enumerate(rounds(nnodes)):
            local = (number + turn) % procs
            yield [(one * procs + local, other * procs + local) for one, other in each]
