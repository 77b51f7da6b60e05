"""What is computed from sizes, times and stamps: bandwidths, clock offsets, and which link or rank is slow. No torch.

Bandwidths are those of nccl-tests. The algorithm's is bytes over time, where the bytes are the whole buffer: a rank's
input of reduce_scatter and all_to_all, its output of all_gather. The bus's takes out the number of ranks, so that it
can be compared with what the hardware gives: it is multiplied by what each link has to carry of the buffer.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_high
from typing import Any, NamedTuple

STANDS_OUT = 2.0
"""Times slower than the median, from which on a link or a device isn't just the last of several."""

_FACTOR = 4
_MAX_REPETITIONS = 100
_CLEAR = 10.0  # so many times the round trip of nearly nothing: at least nine tenths are for what is carried
_ITEM_BYTES = 4

_BUS_TURNS = {"all_reduce": 2, "butterfly": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""How often each link has to carry the buffer but for one rank's part of it."""


def bus_factor(name: str, ranks: int) -> float:
    """What the algorithm's bandwidth of this exchange is multiplied by."""
    turns = _BUS_TURNS.get(name)
    return 1.0 if turns is None else turns * (ranks - 1) / ranks


def sizes(max_bytes: int) -> list[int]:
    """Bytes to exchange: 4, 16, 64 and so on up to `max_bytes`, which is 4 at least."""
    found = [_ITEM_BYTES]
    while found[-1] * _FACTOR <= max_bytes:
        found.append(found[-1] * _FACTOR)
    return found


def items(size_bytes: int, *, parts: int = 1) -> int:
    """How many values of 4 bytes are in so many, or a few more, so that each of `parts` has as many."""
    return -(-size_bytes // (_ITEM_BYTES * parts)) * parts


def repetitions(once_s: float, *, target_s: float) -> int:
    """How often to repeat what takes `once_s`: 1 where that is long enough to be measured by itself."""
    return max(1, min(_MAX_REPETITIONS, int(target_s / max(once_s, 1e-9))))


def point(name: str, *, size_bytes: int, seconds: float, repetitions: int, ranks: int, count: int) -> dict[str, Any]:
    """One measured size of the exchange `name`, of `count` values, as preflight.json has it."""
    moved = count * _ITEM_BYTES
    algorithm = moved / seconds
    return {
        "size_bytes": size_bytes,
        "bytes": moved,
        "repetitions": repetitions,
        "seconds": seconds,
        "algorithm_bytes_per_s": algorithm,
        "bus_bytes_per_s": algorithm * bus_factor(name, ranks),
    }


class Budget:
    """Seconds to measure in. Whoever spends tells it the same on every rank, so that all decide alike."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def share(self, parts: int) -> float:
        """Of the first of `parts` things that are still to be done."""
        return max(self.left_s, 0.0) / parts

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds


# Clocks


class Stamps(NamedTuple):
    """One round trip: when it was sent and the answer was there, by one clock; received and answered, by the other."""

    sent: float
    received: float
    answered: float
    back: float

    @property
    def delay_s(self) -> float:
        """On the way, there and back."""
        return (self.back - self.sent) - (self.answered - self.received)


def clock_offset(rounds: Sequence[Stamps]) -> tuple[float, float]:
    """By how many seconds the other clock is ahead, and by how many that may be wrong, as NTP has it.

    Of the round that was fastest: half of its delay is the most that the two ways can differ by. RFC 5905, section 8.
    """
    best = min(rounds, key=lambda stamps: stamps.delay_s)
    offset = ((best.received - best.sent) + (best.answered - best.back)) / 2
    return offset, max(best.delay_s, 0.0) / 2


# Links


def grows(once_s: float, *, trips: int, spent_s: float, round_trip_s: float, limit_s: float) -> bool:
    """Whether so many trips of a size four times as large are to be timed as that of which one took `once_s`.

    Where there is time for it; and anyway as long as it is rather the way that takes it, a `round_trip_s` of nearly
    nothing, than what is carried.
    """
    return spent_s + trips * _FACTOR * once_s <= limit_s or once_s < _CLEAR * round_trip_s


def compared(links: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The links, each with bytes_per_s at its best and bytes, the size of that; and with compared_bytes_per_s and
    compared_bytes: the largest size that all of its kind (within a node, or between nodes) have measured.

    links: each with is_within_node and points: bytes, seconds (one way), of one size at least that all have.
    """
    common: dict[bool, set[int]] = {}
    for link in links:
        own = {point["bytes"] for point in link["points"]}
        common[link["is_within_node"]] = common.get(link["is_within_node"], own) & own
    found = []
    for link in links:
        rates = {point["bytes"]: point["bytes"] / point["seconds"] for point in link["points"]}
        best, size = max(rates, key=rates.__getitem__), max(common[link["is_within_node"]])
        own_best = {"bytes_per_s": rates[best], "bytes": best}
        found.append({**link, **own_best, "compared_bytes_per_s": rates[size], "compared_bytes": size})
    return found


def slowest_link(links: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The link that is slowest beside others of its kind (within a node, or between nodes), by bandwidth.

    links: as `compared` gives them. Gives it with `times_slower` than the median of the others of its kind, the faster
    of two, 1 for the only one of its kind, and `stands_out`; None without a link.
    """
    found: list[tuple[float, Mapping[str, Any]]] = []
    for is_within in (True, False):
        alike = sorted(
            (link for link in links if link["is_within_node"] == is_within),
            key=lambda each: each["compared_bytes_per_s"],
        )
        if alike:  # of a kind it is the one with the least bandwidth: beside it the others are fastest
            others = [each["compared_bytes_per_s"] for each in alike[1:]] or [alike[0]["compared_bytes_per_s"]]
            found.append((median_high(others) / alike[0]["compared_bytes_per_s"], alike[0]))
    if not found:
        return None
    factor, link = max(found, key=lambda each: (each[0], -each[1]["compared_bytes_per_s"]))
    return {**link, "times_slower": factor, "stands_out": factor >= STANDS_OUT}


def slow_ends(links: Sequence[Mapping[str, Any]]) -> list[int]:
    """Nodes all of whose links to other nodes are slow: at least `STANDS_OUT` times beside the median of those that
    don't touch the node, and less than so many times beside one another. Empty with fewer than three nodes, where
    nobody can tell which end it is.

    links: as `compared` gives them.
    """
    between = [(link["nodes"], link["compared_bytes_per_s"]) for link in links if not link["is_within_node"]]
    all_rates, rates_of = sorted(rate for _, rate in between), dict[int, list[float]]()
    for nodes, rate in between:
        for node in nodes:
            rates_of.setdefault(node, []).append(rate)
    found = []
    for node, own in sorted(rates_of.items()):
        if not 1 < len(own) < len(between) or max(own) >= STANDS_OUT * min(own):
            continue
        # The median of the others is this at most: that makes thousands of links quick to look through.
        greatest = all_rates[(len(between) + len(own)) // 2]
        if max(own) * STANDS_OUT <= greatest:
            others = [rate for nodes, rate in between if node not in nodes]
            found += [node] if max(own) * STANDS_OUT <= median(others) else []
    return found


def slowest_device(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The device whose matmul is slowest: rank, device, flops_per_s, times_slower than the median of the others (the
    faster of two; 1 for the only one) and stands_out. ranks: as preflight.json has them."""
    found = [{"rank": each["rank"], **one} for each in ranks for one in each["matmul"]]
    if not found:
        return None
    slowest = min(found, key=lambda each: each["flops_per_s"])
    others = [each["flops_per_s"] for each in found if each is not slowest]
    factor = median_high(others) / slowest["flops_per_s"] if others else 1.0
    return {**slowest, "times_slower": factor, "stands_out": factor >= STANDS_OUT}


def lateness(waits: Sequence[Sequence[float]]) -> list[float]:
    """By how many seconds each rank came after the first, the median of several barriers.

    waits: of each rank, how long each barrier took it; who came first waits longest.
    """
    longest = [max(round_s) for round_s in zip(*waits, strict=True)]
    return [median(most - one for most, one in zip(longest, own, strict=True)) for own in waits]
