"""Whether ranks wait for one another as they should, and needn't where they shouldn't."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from framework.distributed.collectives import barrier
from framework.preflight.lines import Lines, difference, pattern, under_way

LATE_S = 0.05
"""How late the late sender is."""

_ROUNDS = 20
_COUNT = 256
_SIDE = 64


def ordered(lines: Lines) -> tuple[dict[str, Any], list[str]]:
    """One rank after the other takes a number from the store, rank 0 first, with a barrier after each.

    No clock is needed to see whether the order was held. Gives number and waits (seconds in each of more barriers) of
    this rank, and what was wrong. Every rank must call it, once in the life of the process group.
    """
    with under_way("barrier", lines.context):
        store = dist.distributed_c10d._get_default_store()
        number = 0
        for turn in range(lines.ranks):
            if turn == lines.rank:
                number = store.add("framework/preflight/turn", 1)
            barrier(lines.context)
        lines.context.wait_for_devices()
        waits = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            barrier(lines.context)
            lines.context.wait_for_devices()
            waits.append(time.perf_counter() - began)
    due = lines.rank + 1
    faults = [] if number == due else [f"its turn was number {number}, and number {due} belongs to it"]
    return {"number": number, "waits_s": waits}, faults


def late_sender(lines: Lines) -> tuple[dict[str, Any] | None, list[str]]:
    """Pairs of neighbours, of which one sends late; the other asks for it at once, and works until it comes.

    Gives worked_s and total_s (until it had come) of this rank as a receiver, None where it was none; and what was
    wrong. Every rank must call it.
    """
    found, faults = None, []
    with under_way("isend/irecv", lines.context):
        for parity in (0, 1):
            barrier(lines.context)
            to = lines.rank + 1 if lines.rank + 1 < lines.ranks or lines.ranks % 2 else 0
            source = (lines.rank - 1) % lines.ranks
            if lines.rank % 2 == parity and to < lines.ranks:
                _send_late(lines, to)
            elif source % 2 == parity and (lines.rank > 0 or lines.ranks % 2 == 0):
                found, fault = _work_and_receive(lines, source)
                faults += [] if fault is None else [f"from rank {source}: {fault}"]
        barrier(lines.context)
    return found, faults


def _send_late(lines: Lines, to: int) -> None:
    values = pattern(lines.rank, _COUNT, device=lines.pair_device)
    time.sleep(LATE_S)  # late on purpose
    work = dist.isend(values, to, group=lines.pairs)
    assert work is not None
    work.wait()


def _work_and_receive(lines: Lines, source: int) -> tuple[dict[str, Any], str | None]:
    expected = pattern(source, _COUNT, device=lines.pair_device)
    arrived = torch.zeros_like(expected)
    square = torch.ones(_SIDE, _SIDE, device=lines.context.device)
    began = time.perf_counter()
    work = dist.irecv(arrived, source, group=lines.pairs)
    free = time.perf_counter()  # later, where a receive holds up who has asked for it
    while time.perf_counter() - began < LATE_S:
        torch.mm(square, square)
        lines.context.wait_for_devices()
    worked_s = time.perf_counter() - free
    assert work is not None
    work.wait()
    lines.context.wait_for_devices()
    return {"worked_s": worked_s, "total_s": time.perf_counter() - began}, difference(arrived, expected)


def matmuls(lines: Lines, *, seconds: float) -> tuple[list[dict[str, Any]], list[str]]:
    """How fast each device of this rank multiplies matrices, all ranks at the same time: device and flops_per_s.

    Of whole numbers, so that the product is exact, and what a device gets wrong is seen. Every rank must call it.
    """
    found, faults = [], []
    with under_way("matmul", lines.context):
        for device in dict.fromkeys(lines.context.devices):
            side = 1024 if device.type == "cpu" else 4096
            left = (torch.arange(side * side, device=device) % 5).float().view(side, side)
            right = (torch.arange(side * side, device=device) % 3).float().view(side, side)
            product = torch.mm(left, right)
            # Sums of rows, in float64: as much of a product as is needed to see one wrong value of it.
            sums = product.cpu().double().sum(dim=1)
            fault = difference(sums, left.cpu().double() @ right.cpu().double().sum(dim=1))
            faults += [] if fault is None else [f"{device}: {fault}"]
            barrier(lines.context)
            times: list[float] = []
            while not times or sum(times) < seconds:
                began = time.perf_counter()
                torch.mm(left, right, out=product)
                lines.context.wait_for_devices()
                times.append(time.perf_counter() - began)
            times.sort()
            found.append({"device": str(device), "flops_per_s": 2 * side**3 / times[len(times) // 2]})
    return found, faults
