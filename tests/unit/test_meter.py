"""Sums and counts of what steps compute: exact, read in one reduction over ranks, and no wait before that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from framework import SumCount
from framework.types import StepOutput
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, Meter, SummedWeights
from tests.helpers.rank_pool import RankPool


def output(loss: float, samples: int, **metrics: SumCount) -> StepOutput:
    return StepOutput(torch.tensor(loss), samples, metrics)


def filled(losses: Mapping[int, float]) -> Meter:
    """One sample for each step: step → loss."""
    meter = Meter()
    for step, loss in losses.items():
        meter.add(output(loss, 1), step=step)
    return meter


def test_losses_and_metrics_are_weighted_means() -> None:
    meter = Meter()
    meter.add(output(1.0, 3, accuracy=(torch.tensor(2), 3), tokens=(10.0, 40), masked=(torch.tensor(0.0), 0)))
    meter.add(output(5.0, 1, accuracy=(torch.tensor(1), 1), tokens=(30.0, 10), masked=(torch.tensor(0.0), 0)))
    # A name without samples has no mean.
    expected = {"accuracy": 3 / 4, "loss": (1.0 * 3 + 5.0) / 4, "tokens": 40 / 50}
    for _ in range(2):
        # Reading changes nothing.
        assert meter.reduce(cpu_context(), extra=[2.0, 0.5]) == (expected, [2.0, 0.5])
    meter.clear()
    assert meter.reduce(cpu_context()) == ({}, [])
    meter.add(output(7.0, 2))
    assert meter.reduce(cpu_context()) == ({"loss": 7.0}, [])


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        # Single precision would lose the ones.
        ([torch.tensor(2.0**24), *[torch.tensor(1.0)] * 1024], (2**24 + 1024) / 1025),
        ([torch.tensor(1.0, dtype=torch.bfloat16)] * 1000, 1.0),
        # Plain numbers aren't rounded.
        ([2.0**24 + 1, torch.tensor(2.0)], (2**24 + 3) / 2),
        ([2**24 + 1, torch.tensor(2.0)], (2**24 + 3) / 2),
        ([torch.tensor(float(step)) for step in range(2500)], 2499 / 2),
        # The sum exceeds the largest number.
        ([torch.tensor(1e308, dtype=torch.float64)] * 3, math.inf),
    ],
    ids=["single", "bfloat16", "float", "int", "many", "large"],
)
def test_sums_are_rounded_once(values: list[Any], mean: float) -> None:
    meter = Meter()
    for value in values:
        meter.add(output(1.0, 1, mixed=(value, 1)))
    assert meter.reduce(cpu_context())[0] == {"loss": 1.0, "mixed": mean}


@pytest.mark.parametrize("worst", [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]])
def test_non_finite_values_give_non_finite_totals(worst: list[float]) -> None:
    assert not math.isfinite(filled(dict(enumerate(worst))).reduce(cpu_context())[0]["loss"])


def test_adding_keeps_no_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    meter = Meter()
    meter.add(StepOutput(loss, 4, {"correct": (loss + 1, torch.tensor(4))}))
    assert [state["values"].requires_grad for state in meter.state_dict().values()] == [False] * 2


@pytest.mark.parametrize(("step", "bad"), [(1, math.nan), (1024, math.inf), (1025, -math.inf), (1500, math.nan)])
def test_the_first_non_finite_step_is_exact(step: int, bad: float) -> None:
    meter = filled(dict.fromkeys(range(1, 1600), 1.0) | {step: bad, step + 3: bad})
    assert not math.isfinite(meter.reduce(cpu_context())[0]["loss"])
    assert meter.first_nonfinite_step(cpu_context()) == step


def test_only_losses_count_as_bad_steps() -> None:
    assert Meter().first_nonfinite_step(cpu_context()) is None
    meter = filled({1: 1.0, 2: 3.0e38})
    meter.add(output(1.0, 1, perplexity=(math.inf, 1)), step=3)
    assert meter.first_nonfinite_step(cpu_context()) is None


# Over ranks


def add_up(context: Context) -> list[Any]:
    rank = context.rank
    weighted = Meter()
    named = Meter()
    absent = Meter()
    counted = Meter()
    resumed = Meter()
    for number in range(rank + 1):
        # Rank r has r + 1 batches of r + 1 samples.
        weighted.add(output(float(10 * rank + number), rank + 1, seen=(1.0, rank + 1)))
    for name in ("a", "z") if rank == 0 else ("z", "a"):
        named.add(output(1.0, 1, a=(1.0, 1), z=(100.0, 1)) if name == "a" else output(1.0, 1, z=(100.0, 1), a=(1.0, 1)))
    if rank != 1:
        absent.add(output(2.0 + rank, 2, right=(1.0, 2)))
    counts: Any = [torch.tensor(3), torch.tensor(0), 5][rank]
    for _ in range(rank + 1):
        counted.add(output(1.0, 2, right=(torch.tensor(2), counts)))
    resumed.load_state_dicts([counted.state_dict()], device=context.device)
    return [
        weighted.reduce(context, extra=[float(rank), 1.0]),
        named.reduce(context)[0],
        absent.reduce(context)[0],
        Meter().reduce(context, extra=[1.0]),
        counted.reduce(context)[0],
        resumed.reduce(context)[0],
    ]


def test_ranks_add_up_with_their_weights(rank_pool: RankPool) -> None:
    samples = 1 + 2 * 2 + 3 * 3
    loss = (0 * 1 + (10 + 11) * 2 + (20 + 21 + 22) * 3) / samples
    # Counts may be tensors, and are saved.
    right = (1 + 2 + 3) * 2 / (3 + 3 * 5)
    expected = [
        ({"loss": loss, "seen": (1 + 2 + 3) / samples}, [3.0, 3.0]),
        # The names come in another order.
        {"a": 1.0, "loss": 1.0, "z": 100.0},
        # Rank 1 has no samples.
        {"loss": (2.0 + 4.0) / 2, "right": 0.5},
        # No rank has any loss.
        ({}, [3.0]),
        {"loss": 1.0, "right": right},
        {"loss": 1.0, "right": right},
    ]
    assert rank_pool.run(add_up, ranks=3) == [expected] * 3


def reduce_later(context: Context) -> dict[str, float]:
    """The second reduction, of a name that only rank 0 has then."""
    meter = Meter()
    meter.add(output(1.0, 1, seldom=(1.0, 1)))
    meter.reduce(context)
    meter.clear()
    meter.add(output(float(context.rank), 1, **({"seldom": (4.0, 2)} if context.rank == 0 else {})))
    return meter.reduce(context)[0]


def test_a_rank_may_lack_names_in_later_reductions(rank_pool: RankPool) -> None:
    assert rank_pool.run(reduce_later, ranks=3) == [{"loss": 1.0, "seldom": 2.0}] * 3


def first_bad_step(context: Context, bad: dict[int, int]) -> int | None:
    losses = dict.fromkeys(range(1, 12), 1.0)
    if context.rank in bad:
        losses[bad[context.rank]] = math.nan
    meter = filled(losses)
    return meter.first_nonfinite_step(context)


@pytest.mark.parametrize(("bad", "first"), [({0: 9, 1: 4}, 4), ({}, None)])
def test_all_ranks_know_the_first_bad_step(rank_pool: RankPool, bad: dict[int, int], first: int | None) -> None:
    assert rank_pool.run(first_bad_step, bad) == [first] * 2


class Copies(TorchDispatchMode):
    """Notes the operations that copy between devices, for which a device is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "weight", [3, 3.0, Fraction(3, 1), np.float64(3), torch.tensor(3), torch.tensor([3.0])], ids=repr
)
def test_a_numeric_weight_needs_no_device_wait(weight: Any) -> None:
    """A copy from the host would: of the weight in the gradients, and of that in the logs."""
    loss = torch.zeros((), device="meta")
    output = StepOutput(loss, 1, weight=weight)
    context = replace(cpu_context(world_size=2), devices=(loss.device,))
    weights = SummedWeights(context, task_name="Task", may_drop=False, counts=True)
    with Copies() as copies:
        weights.weighted(output, num_samples=1, scale=0.5)
        Meter().add(output)
    assert copies.seen == []
