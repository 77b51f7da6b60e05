"""Checks between ranks: barrier, links, exchanges of growing size, matmul. Values first, then times."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.butterfly import butterfly_all_reduce_mean
from framework.distributed.collectives import barrier
from framework.distributed.context import Context
from framework.distributed.process_group import new_gloo_group
from framework.errors import RunError, describe_error
from framework.jobs.preflight.report import BETWEEN, WITHIN
from framework.monitoring.rank_log import logger

NUM_BARRIERS = 20
NUM_TRIPS = 10
"""Round trips of each pair that count; one more before them opens the connection."""
LEAST_ROUNDS = 8
"""Rounds of each kind of links that are measured however little time is left."""
BUS_TURNS = {
    "send/recv": 0,
    "broadcast": 0,
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
    "butterfly": 2,
}
"""Exchange → how often each link carries the buffer without one rank's part; 0: the whole buffer, once."""

_PERIOD = 1009  # of test values; a prime, so that swapped blocks of any usual size are seen
_MAX_REPETITIONS = 100
_SMALL_BYTES = 65536  # smaller sizes take no time, and are always checked
_LINK_BYTES, _LINK_TRIPS = 2**22, 3  # of the large messages
_UNSUPPORTED = re.compile(r"not support|unsupported|not implemented", re.IGNORECASE)

Pair = tuple[int, int]
Link = dict[str, Any]  # as in preflight.json


@dataclass
class Peers:
    """How this rank reaches the others, and the wrong values it found, as preflight.json has them."""

    context: Context
    group: dist.ProcessGroup | None  # for sends and receives; None: the default one
    device: torch.device  # of what is sent and received
    faults: list[dict[str, Any]] = field(default_factory=list)
    _check: str = ""

    def send(self, values: Tensor, to: int) -> None:
        dist.send(values, to, group=self.group)

    def receive(self, values: Tensor, source: int) -> None:
        dist.recv(values, source, group=self.group)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Name the check in this rank's log, in faults, and in errors.

        Raises RunError for a RuntimeError, which torch's collectives raise if another rank doesn't answer.
        """
        logger.info("preflight: %s", name)
        self._check = name
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"Preflight check {name} failed on rank {self.context.rank} of {self.context.world_size}: "
                f"{describe_error(error)}"
            ) from error

    def compare(self, received: Tensor, expected: Tensor, *, label: str) -> None:
        """Add a fault if values differ."""
        wrong = (received != expected).nonzero().flatten()  # NaN differs from everything
        if len(wrong):
            first = int(wrong[0])
            text = (
                f"{label}{len(wrong):,} of {received.numel():,} values are wrong; number {first} is "
                f"{received[first].item():g} instead of {expected[first].item():g}"
            )
            self.faults.append({"check": self._check, "rank": self.context.rank, "text": text})


@contextmanager
def connect_peers(context: Context, *, timeout_s: float) -> Iterator[Peers]:
    """Open and close what sends and receives need. Every rank must enter it, inside the process group.

    Gloo counts sends and receives as collectives, and the monitor blames the rank whose count is behind. So they get a
    group of their own.
    """
    if context.world_size == 1 or context.backend != dist.Backend.GLOO:
        yield Peers(context, None, context.device)
        return
    group = new_gloo_group(timeout_s)
    yield Peers(context, group, torch.device("cpu"))  # gloo sends from the CPU only
    barrier(context)  # no rank leaves while another still needs it
    dist.destroy_process_group(group)


def max_over_ranks(value: float, context: Context) -> float:
    """Return the maximum over ranks, the same on every rank. Every rank must call it."""
    greatest = torch.tensor(value, device=context.device)
    if context.world_size > 1:
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return greatest.item()


def sent_values(ranks: Iterable[int], count: int, *, device: torch.device, begin: int = 0) -> Tensor:
    """Return the sum of what these ranks send, from place `begin` on: whole float32 numbers, so that sums are exact."""
    places = torch.arange(_PERIOD) * 7 + 1
    table = torch.stack([(places + rank * 13) % _PERIOD for rank in ranks]).sum(dim=0).float()
    return table.roll(-(begin % _PERIOD)).repeat(-(-count // _PERIOD))[:count].to(device)


def time_barriers(peers: Peers) -> tuple[list[float], list[float]]:
    """Return of each barrier the seconds that this rank spent in it, and the time of day at its end.

    Every rank must call it.
    """
    waits_s, times = list[float](), list[float]()
    with peers.check("barrier"):
        for number in range(1 + NUM_BARRIERS):
            peers.context.wait_for_devices()
            began = time.perf_counter()
            barrier(peers.context)
            peers.context.wait_for_devices()
            if number > 0:  # the first opens connections
                times.append(time.time())
                waits_s.append(time.perf_counter() - began)
    return waits_s, times


# Links between pairs of ranks


def measure_links(peers: Peers, *, max_bytes: int, seconds: float) -> list[Link]:
    """Measure pair after pair for about `seconds`; links within and between nodes get half of it each.

    Return the links that this rank timed. Every rank must call it.
    """
    topology, links = peers.context.topology, list[Link]()
    with peers.check("ping-pong"):
        kinds = [rounds for rounds in link_rounds(topology.nnodes, topology.procs_per_node) if rounds]
        for rounds in kinds:
            links += _measure_rounds(rounds, peers, max_bytes=max_bytes, seconds=seconds / len(kinds))
    return links


def link_rounds(nnodes: int, procs: int) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return the rounds of pairs within nodes, and between nodes for ranks of the same local rank.

    Pairs of a round share nothing. Within a node they share memory and cores, so each node has one pair at a time;
    between nodes they share a card, so each node is in one pair at a time, and the rounds change the local rank, so
    that all cards of a node are used early.
    """
    within = [
        [(node * procs + one, node * procs + other) for node in range(nnodes)]
        for pairs in _round_robin(procs)
        for one, other in pairs
    ]
    between = [
        [(one * procs + (number + turn) % procs, other * procs + (number + turn) % procs) for one, other in pairs]
        for turn in range(procs)
        for number, pairs in enumerate(_round_robin(nnodes))
    ]
    return within, between


def _round_robin(number: int) -> Iterator[list[Pair]]:
    """Pair each of `number` once with each other, in rounds in which none is in two pairs: the circle method.

    The first keeps its place, all others move on after each round; opposites are pairs. With an odd number one rests.
    https://en.wikipedia.org/wiki/Round-robin_tournament
    """
    circle = list(range(number + number % 2))
    half = len(circle) // 2
    for _ in circle[1:] if number > 1 else []:
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in opposite if max(pair) < number]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _measure_rounds(rounds: Sequence[list[Pair]], peers: Peers, *, max_bytes: int, seconds: float) -> list[Link]:
    """Return the links that this rank timed. All ranks end after the same round."""
    rank, began, links = peers.context.rank, time.perf_counter(), list[Link]()
    for number, pairs in enumerate(rounds, start=1):
        for pair in pairs:
            if rank in pair:
                is_timing = rank == pair[sum(pair) % 2]  # so that every rank times about as many links
                link = _exchange_messages(sum(pair) - rank, peers, max_bytes=max_bytes, is_timing=is_timing)
                links += [link] if is_timing else []
        spent_s = max_over_ranks(time.perf_counter() - began, peers.context)  # all ranks wait here
        if number >= LEAST_ROUNDS and spent_s * (number + 1) / number > seconds:
            break
    return links


def _exchange_messages(other: int, peers: Peers, *, max_bytes: int, is_timing: bool) -> Link:
    """Send small messages and a few large ones there and back. `is_timing` is true on the rank that sends first."""
    context, count = peers.context, -(-min(_LINK_BYTES, max_bytes) // 4)
    own, expected = (sent_values([rank], count, device=peers.device) for rank in (context.rank, other))
    received = torch.zeros_like(expected)

    def round_trip(count: int) -> float:
        context.wait_for_devices()
        began = time.perf_counter()
        if is_timing:
            peers.send(own[:count], other)
        peers.receive(received[:count], other)
        context.wait_for_devices()
        seconds = time.perf_counter() - began
        if not is_timing:
            peers.send(own[:count], other)
        return seconds

    round_trip(1)  # opens the connection
    trips_s = [round_trip(1) for _ in range(NUM_TRIPS)]
    large_s = min(round_trip(count) for _ in range(_LINK_TRIPS))  # something else may have disturbed the others
    peers.compare(received, expected, label=f"from rank {other}: ")
    ranks = sorted((context.rank, other))
    nodes = [rank // context.topology.procs_per_node for rank in ranks]
    return {
        "ranks": ranks,
        "nodes": nodes,
        "kind": WITHIN if nodes[0] == nodes[1] else BETWEEN,
        "round_trips_s": trips_s,
        "latency_s": median(trips_s) / 2,
        "bytes": 4 * count,
        "bytes_per_s": 2 * 4 * count / large_s,
    }


# Exchanges


def make_call(name: str, peers: Peers, count: int) -> tuple[Callable[[], object], Tensor, Tensor]:
    """Return a call of one of `BUS_TURNS` with a buffer of `count` values, what it receives, and what is expected."""
    context = peers.context
    rank, world_size = context.rank, context.world_size
    part = count // world_size
    values = partial(sent_values, device=context.device)
    own, total = values([rank], count), values(range(world_size), count)
    match name:
        case "send/recv":
            return _ring(peers, count)
        case "broadcast":
            expected = values([0], count)
            received = own if rank == 0 else torch.zeros_like(own)
            return partial(dist.broadcast, received, src=0), received, expected
        case "all_reduce":
            return partial(dist.all_reduce, own), own, total
        case "reduce_scatter":
            received = torch.zeros_like(own[:part])
            return partial(dist.reduce_scatter_tensor, received, own), received, total.chunk(world_size)[rank]
        case "all_gather":
            received, expected = torch.zeros_like(own), torch.cat([values([r], part) for r in range(world_size)])
            return partial(dist.all_gather_into_tensor, received, own[:part]), received, expected
        case "all_to_all":
            received = torch.zeros_like(own)
            expected = torch.cat([values([r], part, begin=rank * part) for r in range(world_size)])
            return partial(dist.all_to_all_single, received, own), received, expected
        case _:  # butterfly
            # Divided on the CPU, as gloo's values are: a GPU's quotient may differ in the last bit.
            mean = (total.cpu() / world_size).to(context.device)
            return partial(butterfly_all_reduce_mean, own, group=peers.group), own, mean


def _ring(peers: Peers, count: int) -> tuple[Callable[[], object], Tensor, Tensor]:
    """Pass rank 0's buffer from rank to rank around a ring."""
    rank, world_size = peers.context.rank, peers.context.world_size
    expected = sent_values([0], count, device=peers.device)
    received = torch.zeros_like(expected)

    def pass_on() -> None:
        if rank == 0:
            peers.send(expected, 1)
        peers.receive(received, (rank - 1) % world_size)
        if rank > 0:
            peers.send(received, (rank + 1) % world_size)

    return pass_on, received, expected


def measure_exchange(name: str, peers: Peers, *, max_bytes: int, seconds: float) -> dict[str, Any]:
    """Check and time the exchange at 4 B, 16 B, 64 B and so on, as far as `seconds` reach; small sizes in any case.

    Bandwidths are those of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Return the entry of
    preflight.json, the same on every rank. Every rank must call it. Raises RunError if another rank doesn't answer; an
    exchange that the backend doesn't support is noted.
    """
    context, turns = peers.context, BUS_TURNS[name]
    found: dict[str, Any] = {"name": name, "unsupported": None, "points": []}
    sizes = [4**exponent for exponent in range(1, 33) if 4**exponent <= max_bytes]
    parts = context.world_size if turns == 1 else 1  # those exchange equal parts of the buffer
    bus = turns * (context.world_size - 1) / context.world_size if turns else 1.0
    began, target_s = time.perf_counter(), seconds / (2 * len(sizes))
    with peers.check(name):
        for size in sizes:
            count = -(-size // (4 * parts)) * parts
            try:
                call, received, expected = make_call(name, peers, count)
                call()  # the first of all opens connections
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if size > sizes[0] or not _UNSUPPORTED.search(str(error)):
                    raise
                found["unsupported"] = describe_error(error)
                break
            peers.compare(received, expected, label=f"of {count * 4:,} bytes, ")
            call_s = max_over_ranks(_timed(call, context), context)
            repetitions = max(1, min(_MAX_REPETITIONS, int(target_s / max(call_s, 1e-9))))
            if repetitions > 1:
                call_s = max_over_ranks(_timed(call, context, repetitions=repetitions), context)
            each_s = call_s / context.world_size if name == "send/recv" else call_s  # around the ring
            found["points"].append(
                {
                    "size_bytes": size,
                    "bytes": 4 * count,
                    "repetitions": repetitions,
                    "seconds": each_s,
                    "algorithm_bytes_per_s": 4 * count / each_s,
                    "bus_bytes_per_s": bus * 4 * count / each_s,
                }
            )
            spent_s = max_over_ranks(time.perf_counter() - began, context)
            # Two calls of the next size, which take four times as long, and repetitions.
            if _SMALL_BYTES <= size < sizes[-1] and spent_s + 8 * call_s + target_s > seconds:
                break
    return found


def _timed(call: Callable[[], object], context: Context, *, repetitions: int = 1) -> float:
    """Return the seconds of one call on this rank, the devices' work included, from when all ranks are ready."""
    context.wait_for_devices()
    barrier(context)
    context.wait_for_devices()
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    context.wait_for_devices()
    return (time.perf_counter() - began) / repetitions


# Devices


def measure_matmul(peers: Peers, *, seconds: float) -> list[dict[str, Any]]:
    """Return the FLOP/s of each device of this rank. All ranks measure at the same time; every rank must call it."""
    found = []
    with peers.check("matmul"):
        for device in dict.fromkeys(peers.context.devices):
            side = 1024 if device.type == "cpu" else 4096
            left, right = torch.ones(2, side, side, device=device)
            product = left @ right  # the first one loads kernels
            peers.context.wait_for_devices()
            barrier(peers.context)
            times_s = list[float]()
            while sum(times_s) < seconds or not times_s:
                began = time.perf_counter()
                torch.mm(left, right, out=product)
                peers.context.wait_for_devices()
                times_s.append(time.perf_counter() - began)
            found.append({"device": str(device), "flops_per_s": 2 * side**3 / median(times_s)})
    return found
