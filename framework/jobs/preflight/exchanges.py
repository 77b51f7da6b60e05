"""Exchanges between all ranks, such as all_reduce, with buffers of growing size: values are checked, then times taken.

Bandwidths are those of nccl-tests: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.butterfly import butterfly_all_reduce_mean
from framework.distributed.collectives import all_gather_single, barrier, reduce_scatter_single
from framework.distributed.context import Context
from framework.jobs.preflight.peers import Peers, max_over_ranks, sent_values

# How often each link carries the buffer without one rank's part. With 1, ranks exchange equal parts of the buffer;
# with 0, the whole buffer is sent, once.
BUS_TURNS = {
    "send/recv": 0,
    "broadcast": 0,
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
    "butterfly": 2,
}

_MAX_REPETITIONS = 100
# Smaller sizes take no time, and are always checked.
_SMALL_BYTES = 65536
_LARGEST_EXPONENT = 32


class Exchange(NamedTuple):
    """An exchange with its buffers."""

    run: Callable[[], object]
    received: Tensor
    # What was received after the first call, if all is well.
    expected: Tensor


def prepare(name: str, peers: Peers, count: int) -> Exchange:
    """Return one of `BUS_TURNS` with a buffer of `count` values."""
    context = peers.context
    rank = context.rank
    world_size = context.world_size
    part = count // world_size
    values = partial(sent_values, device=context.device)
    own = values([rank], count)
    total = values(range(world_size), count)
    received = torch.zeros_like(own)
    match name:
        case "send/recv":
            return _send_to_the_next(peers, count)
        case "broadcast":
            return Exchange(partial(dist.broadcast, own, src=0), own, values([0], count))
        case "all_reduce":
            return Exchange(partial(dist.all_reduce, own), own, total)
        case "reduce_scatter":
            received = received[:part]
            return Exchange(partial(reduce_scatter_single, received, own), received, total.chunk(world_size)[rank])
        case "all_gather":
            expected = torch.cat([values([sender], part) for sender in range(world_size)])
            return Exchange(partial(all_gather_single, received, own[:part]), received, expected)
        case "all_to_all":
            expected = torch.cat([values([sender], part, begin=rank * part) for sender in range(world_size)])
            return Exchange(partial(dist.all_to_all_single, received, own), received, expected)
        case "butterfly":
            # Divided where the butterfly divides: the quotients of a GPU and a CPU may differ in the last bit.
            mean = (total.to(peers.device) / world_size).to(context.device)
            return Exchange(partial(butterfly_all_reduce_mean, own, group=peers.group), own, mean)
    raise AssertionError(name)


def _send_to_the_next(peers: Peers, count: int) -> Exchange:
    """Let each rank send to the next one and receive from the one before."""
    rank = peers.context.rank
    world_size = peers.context.world_size
    previous_rank = (rank - 1) % world_size
    next_rank = (rank + 1) % world_size
    sent = sent_values([rank], count, device=peers.device)
    expected = sent_values([previous_rank], count, device=peers.device)
    received = torch.zeros_like(sent)
    messages = [
        dist.P2POp(dist.isend, sent, next_rank, group=peers.group),
        dist.P2POp(dist.irecv, received, previous_rank, group=peers.group),
    ]

    def run() -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return Exchange(run, received, expected)


def measure_exchange(name: str, peers: Peers, *, max_bytes: int, seconds: float) -> dict[str, Any]:
    """Check and time the exchange at 4 B, 16 B, 64 B and so on, as far as `seconds` reach; small sizes in any case.

    Return the entry of preflight.json, the same on every rank. Every rank must call it. Raises RunError if another
    rank doesn't answer.
    """
    context = peers.context
    sizes = [4**exponent for exponent in range(1, 1 + _LARGEST_EXPONENT) if 4**exponent <= max_bytes]
    num_parts = context.world_size if BUS_TURNS[name] == 1 else 1
    bus_factor = _bus_factor(BUS_TURNS[name], context.world_size)
    # Half of the time is for repetitions, the other half for the first call of each size.
    target_s = seconds / (2 * len(sizes))
    points = []
    began = time.perf_counter()
    with peers.check(name):
        # The first one opens connections.
        prepare(name, peers, num_parts).run()
        for size in sizes:
            count = num_parts * math.ceil(size / (4 * num_parts))
            buffer_bytes = 4 * count
            exchange = prepare(name, peers, count)
            call_s = _timed(exchange.run, context)
            peers.compare(exchange.received, exchange.expected, label=f"of {buffer_bytes:,} bytes, ")

            repetitions = int(target_s / max(call_s, 1e-9))
            repetitions = max(1, min(_MAX_REPETITIONS, repetitions))
            call_s = _timed(exchange.run, context, repetitions=repetitions)
            points.append(
                {
                    "size_bytes": size,
                    "bytes": buffer_bytes,
                    "repetitions": repetitions,
                    "seconds": call_s,
                    "algorithm_bytes_per_s": buffer_bytes / call_s,
                    "bus_bytes_per_s": bus_factor * buffer_bytes / call_s,
                }
            )

            spent_s = max_over_ranks(time.perf_counter() - began, context)
            # Two calls of the next size, which take four times as long, and its repetitions.
            next_s = 8 * call_s + target_s
            if size >= _SMALL_BYTES and spent_s + next_s > seconds:
                break
    return {"name": name, "points": points}


def _bus_factor(turns: int, world_size: int) -> float:
    """Return by what the algorithm bandwidth is multiplied to get the bus bandwidth."""
    if turns == 0:
        return 1.0
    return turns * (world_size - 1) / world_size


def _timed(call: Callable[[], object], context: Context, *, repetitions: int = 1) -> float:
    """Return the seconds of one call on the slowest rank, the devices' work included, from when all are ready."""
    context.wait_for_devices()
    barrier(context)
    context.wait_for_devices()
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    context.wait_for_devices()
    return max_over_ranks((time.perf_counter() - began) / repetitions, context)
