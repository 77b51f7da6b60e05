"""Whether ranks wait for one another as they should, and needn't where they shouldn't."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from framework.distributed.collectives import barrier
from framework.distributed.context import Context
from framework.preflight.lines import Lines, difference, pattern, under_way

LATE_S = 0.05
"""For how long a receiver works before its sender sends."""
BLOCKED_S = 20.0
"""How long a late sender waits for its receiver to be free and to work; then it sends all the same."""

_ROUNDS = 20
_COUNT = 256
_SIDE = 64
_KEY = "framework/preflight"
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # before a store is asked again, by as many ranks as there are


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
                number = store.add(f"{_KEY}/turn", 1)
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


def late_sender(lines: Lines, *, timeout_s: float) -> tuple[dict[str, Any] | None, list[str]]:
    """Pairs of neighbours, of which one asks for a message, works, and only then tells the other to send it.

    It tells by the run's store, for which it needs neither the message nor the way of it: where `irecv` held it up
    until the message is there, it couldn't. So whether both went on at once is known without a clock. The sender waits
    `BLOCKED_S` at most, half of `timeout_s` where that is less, then it sends all the same.

    Gives what this rank saw as a receiver, None where it was none: source; posted_s, until `irecv` came back; worked_s;
    total_s, until the message was there; and overlapped. And what was wrong. Every rank must call it, once in the life
    of the process group.
    """
    found, faults = None, []
    limit_s = min(BLOCKED_S, timeout_s / 2)
    with under_way("isend/irecv", lines.context):
        for parity in (0, 1):
            barrier(lines.context)
            to = lines.rank + 1 if lines.rank + 1 < lines.ranks or lines.ranks % 2 else 0
            source = (lines.rank - 1) % lines.ranks
            if lines.rank % 2 == parity and to < lines.ranks:
                _send_late(lines, to, limit_s=limit_s)
            elif source % 2 == parity and (lines.rank > 0 or lines.ranks % 2 == 0):
                found, fault = _work_and_receive(lines, source)
                faults += [] if fault is None else [f"from rank {source}: {fault}"]
        barrier(lines.context)
    return found, faults


def _send_late(lines: Lines, to: int, *, limit_s: float) -> None:
    values = pattern(lines.rank, _COUNT, device=lines.pair_device)
    lines.send(values, to)  # opens the connection, for which some backends want both at the same time
    if not _has_worked(to, limit_s=limit_s):
        dist.distributed_c10d._get_default_store().set(f"{_KEY}/held_up/{to}", "")
    work = dist.isend(values, to, group=lines.pairs)
    assert work is not None
    work.wait()


def _has_worked(rank: int, *, limit_s: float) -> bool:
    """Wait until that rank says so. Asked again and again: a store whose `wait` ends in vain prints of it."""
    store, deadline, pause_s = dist.distributed_c10d._get_default_store(), time.monotonic() + limit_s, _PAUSE_S
    while not store.check([f"{_KEY}/worked/{rank}"]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _work_and_receive(lines: Lines, source: int) -> tuple[dict[str, Any], str | None]:
    expected = pattern(source, _COUNT, device=lines.pair_device)
    arrived = torch.zeros_like(expected)
    lines.receive(arrived, source)
    arrived.zero_()
    square = torch.ones(_SIDE, _SIDE, device=lines.context.device)
    store = dist.distributed_c10d._get_default_store()
    lines.context.wait_for_devices()
    began = time.perf_counter()
    work = dist.irecv(arrived, source, group=lines.pairs)
    posted = time.perf_counter()
    was_free = not store.check([f"{_KEY}/held_up/{lines.rank}"])  # so nothing was sent yet
    begun = time.perf_counter()
    while time.perf_counter() - begun < LATE_S:
        torch.mm(square, square)
        _wait_for_work(lines.context)
    worked_s = time.perf_counter() - begun
    store.set(f"{_KEY}/worked/{lines.rank}", "")
    assert work is not None
    work.wait()
    lines.context.wait_for_devices()
    told = {
        "source": source,
        "posted_s": posted - began,
        "worked_s": worked_s,
        "total_s": time.perf_counter() - began,
        "overlapped": was_free,
    }
    return told, difference(arrived, expected)


def _wait_for_work(context: Context) -> None:
    """Until the device has done what this thread gave it; the receive isn't among that, it has a queue of its own."""
    if context.device.type != "cpu":
        torch.accelerator.current_stream(context.device).synchronize()


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
