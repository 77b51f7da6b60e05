from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from framework import meter as meter_module
from framework.distributed.context import Context
from framework.errors import RunError
from framework.meter import Meter
from framework.types import StepOutput, SumCount
from tests.unit.simulated_ranks import SimulatedRanks, cpu_context


def output(loss: float, samples: int, **metrics: SumCount) -> StepOutput:
    return StepOutput(torch.tensor(loss), samples, metrics)


def fill(meter: Meter, losses: Mapping[int, float]) -> None:
    """One sample for each step: step → loss."""
    for step, loss in losses.items():
        meter.add(output(loss, 1), step=step)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], SimulatedRanks]:
    def make(world_size: int) -> SimulatedRanks:
        simulated = SimulatedRanks(world_size)
        monkeypatch.setattr(meter_module, "gather_to_all", simulated.gather)
        monkeypatch.setattr(meter_module, "sum_over_ranks", simulated.sum)
        return simulated

    return make


def test_a_loss_weighs_its_samples_and_metrics_are_sums_over_their_own_counts() -> None:
    meter = Meter()
    meter.add(output(1.0, 3, accuracy=(torch.tensor(2), 3), tokens=(10.0, 40)))
    meter.add(output(5.0, 1, accuracy=(torch.tensor(1), 1), tokens=(30.0, 10)))
    values, extra = meter.reduce(cpu_context(), extra=[2.0, 0.5])
    assert values == {"accuracy": 3 / 4, "loss": (1.0 * 3 + 5.0) / 4, "tokens": 40 / 50}
    assert extra == [2.0, 0.5]


def test_counts_may_be_tensors_and_survive_a_checkpoint(ranks: Callable[[int], SimulatedRanks]) -> None:
    """Rank 2 has a plain count, and rank 3 no sample."""
    counts: list[Any] = [torch.tensor(3), torch.tensor(0), 5]

    def one(context: Context) -> Any:
        meter, resumed = Meter(), Meter()
        for _ in range(context.rank + 1 if context.rank < 3 else 0):
            meter.add(output(1.0, 2, right=(torch.tensor(2), counts[context.rank])))
        resumed.load_state_dicts([meter.state_dict()], device=torch.device("cpu"))
        values = [each.reduce(context, extra=[1.0]) for each in (meter, resumed)]
        meter.clear()
        return *values, meter.reduce(context)

    expected = {"loss": 1.0, "right": (1 + 2 + 3) * 2 / (3 + 3 * 5)}
    assert ranks(4).run(one) == [((expected, [4.0]), (expected, [4.0]), ({}, []))] * 4


def test_totals_read_at_once_are_those_summed_on_the_device() -> None:
    """Alone and on a CPU values are read and added here; of several GPUs only the sum is read."""
    meter, draw = Meter(), torch.Generator().manual_seed(0)
    for step in range(2500):  # more than one pack
        loss = torch.rand((), generator=draw) * 10 ** (step % 7)
        right = torch.randint(0, 9, (), generator=draw)
        meter.add(StepOutput(loss, 1 + step % 3, {"right": (right, 9), "half": (loss.bfloat16(), 1)}), step=step)
    names = ["half", "loss", "never", "right"]
    on_device = [meter._get(name).total(torch.device("cpu")).item() for name in names]
    assert [value > 0 for value in on_device] == [True, True, False, True]
    for device in (torch.device("cpu"), torch.device("cuda")):  # of a GPU packed tensors are read; nothing goes there
        for asked in (names, ["loss"], ["never"]):
            expected = [on_device[names.index(name)] for name in asked]
            assert meter_module._totals_on_host([meter._get(name) for name in asked], device) == pytest.approx(
                expected, rel=1e-14, abs=0
            )


@pytest.mark.parametrize("worst", [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]])
def test_totals_of_what_is_not_finite_are_not_finite(worst: list[float]) -> None:
    meter = Meter()
    fill(meter, dict(enumerate(worst)))
    assert not math.isfinite(meter.reduce(cpu_context())[0]["loss"])


def test_totals_beyond_the_largest_number_are_infinite() -> None:
    meter = Meter()
    for _ in range(3):
        meter.add(output(1.0, 1, large=(torch.tensor(1e308, dtype=torch.float64), 1)))
    assert meter.reduce(cpu_context())[0] == {"loss": 1.0, "large": math.inf}


def test_reading_changes_nothing_and_clearing_begins_anew() -> None:
    meter = Meter()
    fill(meter, {1: 2.0})
    assert meter.reduce(cpu_context()) == meter.reduce(cpu_context()) == ({"loss": 2.0}, [])
    meter.clear()
    assert meter.reduce(cpu_context()) == ({}, [])
    fill(meter, {2: 7.0})
    assert meter.reduce(cpu_context()) == ({"loss": 7.0}, [])


def test_a_name_without_samples_is_left_out() -> None:
    meter = Meter()
    meter.add(output(1.0, 2, masked=(torch.tensor(0.0), 0)))
    assert meter.reduce(cpu_context())[0] == {"loss": 1.0}


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2500])
def test_many_values_are_packed_and_each_still_counts(count: int) -> None:
    meter = Meter()
    for step in range(count):
        meter.add(output(float(step), 1 + step % 2, twice=(torch.tensor(2 * step), 1)), step=step)
    held = meter._series["loss"]
    assert len(held._loose) == count % 1024
    assert len(held._packed) == count // 1024
    values, _ = meter.reduce(cpu_context())
    weights = [1 + step % 2 for step in range(count)]
    assert values["loss"] == sum(step * weight for step, weight in enumerate(weights)) / sum(weights)
    assert values["twice"] == float(count - 1)


def test_sums_are_in_double_precision() -> None:
    """In single precision 2**24 + 1 is 2**24, so the small values would be lost."""
    meter = Meter()
    fill(meter, {1: 2.0**24, **dict.fromkeys(range(2, 1026), 1.0)})
    assert meter.reduce(cpu_context())[0]["loss"] == (2**24 + 1024) / 1025


def test_a_plain_number_is_not_rounded() -> None:
    meter = Meter()
    meter.add(output(1.0, 1, mixed=(2.0**24 + 1, 1), whole=(2**24 + 1, 1)))
    meter.add(output(1.0, 1, mixed=(torch.tensor(2.0), 1), whole=(torch.tensor(2.0), 1)))
    values, _ = meter.reduce(cpu_context())
    assert values == {"loss": 1.0, "mixed": (2**24 + 3) / 2, "whole": (2**24 + 3) / 2}


def test_half_precision_losses_are_summed_in_double_precision() -> None:
    meter = Meter()
    for _ in range(1000):
        meter.add(StepOutput(torch.tensor(1.0, dtype=torch.bfloat16), 1))
    assert meter.reduce(cpu_context())[0]["loss"] == 1.0


def test_adding_waits_for_nothing_and_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.ones((), requires_grad=True) * 2
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, _refuse(name))
    meter = Meter()
    for step in range(3):
        meter.add(StepOutput(loss, 4, {"correct": (torch.tensor(3), torch.tensor(4))}), step=step)
    assert not any(value.requires_grad for series in meter._series.values() for value in series._loose)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 7, 1024, 1025, 1500])
def test_the_first_step_that_is_not_finite_is_known_exactly(bad: float, step: int) -> None:
    meter = Meter()
    fill(meter, {each: bad if each in (step, step + 3) else 1.0 for each in range(1, 1600)})
    assert not math.isfinite(meter.reduce(cpu_context())[0]["loss"])
    assert meter.first_nonfinite_step(cpu_context()) == step


def test_without_a_bad_step_none_is_found() -> None:
    meter = Meter()
    assert meter.first_nonfinite_step(cpu_context()) is None
    fill(meter, {1: 1.0, 2: 3.0e38})
    assert meter.first_nonfinite_step(cpu_context()) is None


def test_only_a_loss_is_asked_for_bad_steps() -> None:
    meter = Meter()
    meter.add(output(1.0, 1, perplexity=(math.inf, 1)), step=1)
    meter.add(output(math.nan, 1, perplexity=(1.0, 1)), step=2)
    assert meter.first_nonfinite_step(cpu_context()) == 2


def test_ranks_add_up_with_their_weights(ranks: Callable[[int], SimulatedRanks]) -> None:
    def one(context: Context) -> Any:
        meter = Meter()
        for number in range(context.rank + 1):  # rank r has r + 1 batches of r + 1 samples
            meter.add(output(float(10 * context.rank + number), context.rank + 1, seen=(1.0, context.rank + 1)))
        return meter.reduce(context, extra=[float(context.rank), 1.0])

    ends = ranks(3).run(one)
    samples = 1 + 2 * 2 + 3 * 3
    loss = (0 * 1 + (10 + 11) * 2 + (20 + 21 + 22) * 3) / samples
    assert ends == [({"loss": loss, "seen": (1 + 2 + 3) / samples}, [3.0, 3.0])] * 3


def test_names_are_reduced_in_one_order_whatever_order_they_came_in(ranks: Callable[[int], SimulatedRanks]) -> None:
    def one(context: Context) -> Any:
        meter = Meter()
        names = ("a", "z") if context.rank == 0 else ("z", "a")
        meter.add(output(1.0, 1, **{name: ({"a": 1.0, "z": 100.0}[name], 1) for name in names}))
        return meter.reduce(context)[0]

    assert ranks(2).run(one) == [{"a": 1.0, "loss": 1.0, "z": 100.0}] * 2


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_rank_without_samples_joins_and_gets_the_same(ranks: Callable[[int], SimulatedRanks], without: int) -> None:
    def one(context: Context) -> Any:
        meter = Meter()
        if context.rank != without:
            meter.add(output(2.0 + context.rank, 2, right=(1.0, 2)))
        return meter.reduce(context)[0]

    losses = [2.0 + rank for rank in range(3) if rank != without]
    assert ranks(3).run(one) == [{"loss": sum(losses) / 2, "right": 0.5}] * 3


def test_no_samples_anywhere_give_no_values(ranks: Callable[[int], SimulatedRanks]) -> None:
    assert ranks(2).run(lambda context: Meter().reduce(context, extra=[1.0])) == [({}, [2.0])] * 2


@pytest.mark.parametrize(("odd", "others"), [(0, 1), (1, 0), (2, 0)])
def test_differing_names_are_refused_on_every_rank_naming_one(
    ranks: Callable[[int], SimulatedRanks], odd: int, others: int
) -> None:
    def one(context: Context) -> Any:
        meter = Meter()
        more = {} if context.rank == odd else {"accuracy": (1.0, 1)}
        meter.add(output(1.0, 1, **more))
        return meter.reduce(context)

    for end in ranks(3).run(one):
        assert isinstance(end, RunError)
        assert f"rank {odd} has ['loss'], others ['accuracy', 'loss']" in str(end)


def test_as_many_but_other_names_are_refused(ranks: Callable[[int], SimulatedRanks]) -> None:
    def one(context: Context) -> Any:
        meter = Meter()
        meter.add(output(1.0, 1, **{f"metric_{context.rank}": (1.0, 1)}))
        return meter.reduce(context)

    for end in ranks(2).run(one):
        assert isinstance(end, RunError)
        assert "rank 1 has ['loss', 'metric_1'], others ['loss', 'metric_0']" in str(end)


def test_names_are_agreed_once_and_a_later_one_is_refused(ranks: Callable[[int], SimulatedRanks]) -> None:
    def one(context: Context) -> Any:
        meter = Meter()
        meter.add(output(1.0, 1))
        meter.reduce(context)
        meter.clear()
        late = {"late": (1.0, 1)} if context.rank == 1 else {}
        meter.add(output(1.0, 1, **late))
        return meter.reduce(context)

    error = ranks(2).run(one)[1]
    assert isinstance(error, RunError)
    assert "Rank 1 reports ['late'], which the first report didn't have: ['loss']" in str(error)


def test_a_rank_with_fewer_names_later_holds_up_nobody(ranks: Callable[[int], SimulatedRanks]) -> None:
    """What it lacks is of the others' samples."""

    def one(context: Context) -> Any:
        meter = Meter()
        meter.add(output(1.0, 1, seldom=(1.0, 1)))
        meter.reduce(context)
        meter.clear()
        more = {"seldom": (4.0, 2)} if context.rank == 0 else {}
        meter.add(output(float(context.rank), 1, **more))
        return meter.reduce(context)[0]

    assert ranks(3).run(one) == [{"loss": 1.0, "seldom": 2.0}] * 3


def test_later_reductions_need_no_second_agreement(ranks: Callable[[int], SimulatedRanks], monkeypatch) -> None:
    simulated = ranks(2)
    gathered: list[Any] = []

    def noted(value: Any, context: Context) -> list[Any]:
        gathered.append(value)
        return simulated.gather(value, context)

    monkeypatch.setattr(meter_module, "gather_to_all", noted)

    def one(context: Context) -> list[float]:
        meter = Meter()
        means = []
        for number in range(3):
            if context.rank == 0 or number == 0:  # later rank 1 has no samples
                meter.add(output(float(number), 1))
            means.append(meter.reduce(context)[0]["loss"])
            meter.clear()
        return means

    assert simulated.run(one) == [[0.0, 1.0, 2.0]] * 2
    assert gathered == [["loss"]] * 2


@pytest.mark.parametrize(("bad", "first"), [({0: 9, 1: 4}, 4), ({1: 5}, 5), ({}, None)])
def test_the_first_bad_step_of_any_rank_is_known_on_all(
    ranks: Callable[[int], SimulatedRanks], bad: dict[int, int], first: int | None
) -> None:
    def one(context: Context) -> int | None:
        meter = Meter()
        fill(meter, {step: math.nan if step == bad.get(context.rank) else 1.0 for step in range(1, 12)})
        return meter.first_nonfinite_step(context)

    assert ranks(2).run(one) == [first] * 2


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise AssertionError(f"Tensor.{name} waits for the device")

    return refuse
