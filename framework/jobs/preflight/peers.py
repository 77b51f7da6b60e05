"""What every check of the preflight stands on: how a rank reaches the others, the values sent, wrong ones received."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.collectives import barrier
from framework.distributed.context import Context
from framework.distributed.process_group import new_group
from framework.errors import RunError, describe_error
from framework.system.rank_log import logger

# Test values repeat after so many. A prime, so that swapped blocks of any usual size are seen.
_PERIOD = 1009


@dataclass
class Peers:
    """How this rank reaches the others, and the wrong values it found, as preflight.json has them."""

    context: Context
    # For sends and receives; None: the default group.
    group: dist.ProcessGroup | None
    # The device of what is sent and received.
    device: torch.device
    faults: list[dict[str, Any]] = field(default_factory=list)
    _check: str = ""

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
        # NaN differs from everything.
        wrong = (received != expected).nonzero().flatten()
        if len(wrong) == 0:
            return
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
    if context.backend != dist.Backend.GLOO:
        yield Peers(context, None, context.device)
        return
    group = new_group(timeout_s)
    # Gloo sends from the CPU only.
    yield Peers(context, group, torch.device("cpu"))
    # No rank leaves while another still needs the group.
    barrier(context)
    dist.destroy_process_group(group)


def max_over_ranks(value: float, context: Context) -> float:
    """Return the maximum over ranks, the same on every rank. Every rank must call it."""
    greatest = torch.tensor(value, device=context.device)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return greatest.item()


def sent_values(ranks: Iterable[int], count: int, *, device: torch.device, begin: int = 0) -> Tensor:
    """Return the sum of what these ranks send: `count` values from index `begin` on.

    They are whole numbers in float32, so that sums are exact.
    """
    indices = torch.arange(_PERIOD)
    period = torch.zeros_like(indices)
    for rank in ranks:
        period += (7 * indices + 1 + 13 * rank) % _PERIOD
    num_periods = math.ceil(count / _PERIOD)
    values = period.float().roll(-(begin % _PERIOD)).repeat(num_periods)
    return values[:count].to(device)
