"""What a strategy reports of its rank's waiting for others, so that a slow rank is blamed and not those that wait."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from framework.strategies import DDP, AllReduce, LocalSGD
from tests.helpers.internals import Context
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]


class Seen:
    """What is reported, in order, among the gradients of the model."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_waiting(self) -> None:
        self.seen.append("waits")

    def end_waiting(self) -> None:
        self.seen.append("continues")

    def waiting_unknown(self) -> None:
        self.seen.append("not known")


class Layers(nn.Module):
    """Two layers, of which the last may be left out."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: seen.seen.append("gradient"))

    def forward(self, inputs: Tensor, *, leaves_out: bool = False) -> Tensor:
        hidden = self.first(inputs)
        result: Tensor = hidden if leaves_out else self.last(hidden)
        return result


STRATEGIES: dict[str, Any] = {
    "ddp": DDP,
    "ddp unused": partial(DDP, find_unused_parameters=True),
    "ddp powersgd": partial(DDP, comm_hook="powersgd"),
    "allreduce": AllReduce,
    "local_sgd": partial(LocalSGD, every_n_steps=2, warmup_steps=1),
}


class Step(NamedTuple):
    """A forward and backward pass: if gradients are exchanged, and if the last layer takes no part."""

    synchronise: bool = True
    leaves_out: bool = False


def watch(context: Context, name: str, steps: list[Step]) -> tuple[bool, list[list[str]]]:
    """Give whether waiting is known, and what is reported in each step."""
    seen = Seen()
    strategy = STRATEGIES[name](context=context)
    wrapped = strategy.wrap(Layers(seen))
    known = strategy.observe_waiting(wrapped, seen)
    found = []
    for step in steps:
        seen.seen.clear()
        with strategy.accumulate(wrapped, synchronise=step.synchronise):
            wrapped(torch.randn(3, 2), leaves_out=step.leaves_out).sum().backward()
        if name == "local_sgd":
            strategy.after_update(wrapped)
        found.append(list(seen.seen))
    return known, found


ALL = ["gradient"] * 4
SOME = ["gradient"] * 2


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A strategy and its steps; if waiting is known, and what is reported in each step."""

    name: str
    steps: list[Step]
    known: bool = True
    wanted: list[list[str]]


@pytest.mark.parametrize(
    "watched",
    [
        Watched(name="ddp", steps=[Step(), Step()], wanted=[[*ALL, "waits"], [*ALL, "waits"]]),
        # Without the last layer's that isn't known.
        Watched(
            name="ddp unused",
            steps=[Step(), Step(leaves_out=True), Step(synchronise=False, leaves_out=True)],
            wanted=[[*ALL, "waits"], [*SOME, "not known"], SOME],
        ),
        Watched(name="allreduce", steps=[Step(synchronise=False), Step()], wanted=[ALL, [*ALL, "waits", "continues"]]),
        # A step of warm-up, then an average in every second.
        Watched(
            name="local_sgd",
            steps=[Step()] * 3,
            wanted=[[*ALL, "waits", "continues"], ALL, [*ALL, "waits", "continues"]],
        ),
        # It waits in the midst of backward.
        Watched(name="ddp powersgd", steps=[Step()], known=False, wanted=[ALL]),
    ],
)
def test_waiting_starts_once_local_gradients_exist(rank_pool: RankPool, watched: Watched) -> None:
    assert rank_pool.run(watch, watched.name, watched.steps, ranks=2) == [(watched.known, watched.wanted)] * 2
