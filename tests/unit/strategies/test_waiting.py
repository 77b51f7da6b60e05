"""What a strategy reports of its rank's waiting for others, so that a slow rank is blamed and not those that wait."""

from __future__ import annotations

from functools import partial
from typing import Any

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


def watch(context: Context, name: str, steps: list[tuple[bool, bool]]) -> tuple[bool, list[list[str]]]:
    """Give whether waiting is known, and what is reported in each step. steps: (synchronises, leaves out a layer)."""
    seen = Seen()
    strategy = STRATEGIES[name](context=context)
    wrapped = strategy.wrap(Layers(seen))
    known = strategy.observe_waiting(wrapped, seen)
    found = []
    for synchronise, leaves_out in steps:
        seen.seen.clear()
        with strategy.accumulate(wrapped, synchronise=synchronise):
            wrapped(torch.randn(3, 2), leaves_out=leaves_out).sum().backward()
        if name == "local_sgd":
            strategy.after_update(wrapped)
        found.append(list(seen.seen))
    return known, found


ALL = ["gradient"] * 4
SOME = ["gradient"] * 2


@pytest.mark.parametrize(
    ("name", "steps", "known", "wanted"),
    [
        ("ddp", [(True, False), (True, False)], True, [[*ALL, "waits"], [*ALL, "waits"]]),
        # Without the last layer's that isn't known.
        (
            "ddp unused",
            [(True, False), (True, True), (False, True)],
            True,
            [[*ALL, "waits"], [*SOME, "not known"], SOME],
        ),
        ("allreduce", [(False, False), (True, False)], True, [ALL, [*ALL, "waits", "continues"]]),
        # A step of warm-up, then an average in every second.
        ("local_sgd", [(True, False)] * 3, True, [[*ALL, "waits", "continues"], ALL, [*ALL, "waits", "continues"]]),
        # It waits in the midst of backward.
        ("ddp powersgd", [(True, False)], False, [ALL]),
    ],
)
def test_waiting_starts_once_local_gradients_exist(
    rank_pool: RankPool, name: str, steps: list[tuple[bool, bool]], known: bool, wanted: list[list[str]]
) -> None:
    assert rank_pool.run(watch, name, steps, ranks=2) == [(known, wanted)] * 2
