from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework import meter as meter_module
from framework.config.schema import Precision
from framework.data.loader import EvalLoader
from framework.data.sampler import evaluation_indices
from framework.distributed.context import Context
from framework.evaluator import evaluate
from framework.precision import PrecisionPlugin
from framework.types import MicroBatch, StepOutput
from tests.unit.simulated_ranks import CPU, SimulatedRanks, cpu_context

FP32 = PrecisionPlugin(Precision.FP32, device=CPU)


class Exact:
    """Whole numbers, so that no order of sums can change the result; remembers which samples it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        (numbers,) = batch
        self.seen += numbers.tolist()
        count = len(numbers)
        squares = model(numbers.double().unsqueeze(1)).sum()
        return StepOutput(numbers.double().mean(), count, {"square": (squares, count), "even": (_even(numbers), count)})

    training_step = validation_step


class Square(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return numbers.square()


def _even(numbers: Tensor) -> Tensor:
    return (numbers % 2 == 0).sum()


def loader(size: int, context: Context, *, batch_size: int, is_even: bool = False) -> EvalLoader:
    return EvalLoader(
        TensorDataset(torch.arange(size)),
        part="val",
        batch_size=batch_size,
        rank=context.rank,
        world_size=context.world_size,
        device=CPU,
        is_even=is_even,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_stand_ins_make_batches_even_and_count_nothing(
    monkeypatch: pytest.MonkeyPatch, world_size: int, batch_size: int
) -> None:
    ranks = SimulatedRanks(world_size)
    monkeypatch.setattr(meter_module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(meter_module, "sum_over_ranks", ranks.sum)
    for size in (1, 3, 7, 8, 29):

        def one(context: Context, size: int = size) -> tuple[int, dict[str, float]]:
            batches = loader(size, context, batch_size=batch_size, is_even=True)
            values = evaluate(Square(), batches, task=Exact(), precision=FP32, context=context, prefix="val")
            return len(list(batches)), values

        ends: list[Any] = ranks.run(one)
        assert len({number for number, _ in ends}) == 1
        most = -(-size // world_size)
        assert ends[0][0] == -(-most // batch_size)
        assert [values["val/square"] for _, values in ends] == [sum(n**2 for n in range(size)) / size] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_sample_counts_once_whatever_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, batch_size: int
) -> None:
    ranks = SimulatedRanks(world_size)
    monkeypatch.setattr(meter_module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(meter_module, "sum_over_ranks", ranks.sum)
    for size in range(1, 61):
        tasks = [Exact() for _ in range(world_size)]

        def one(context: Context, size: int = size, tasks: list[Exact] = tasks) -> dict[str, float]:
            batches = loader(size, context, batch_size=batch_size)
            task = tasks[context.rank]
            return evaluate(Square(), batches, task=task, precision=FP32, context=context, prefix="val")

        ends: list[Any] = ranks.run(one)
        assert sorted(number for task in tasks for number in task.seen) == list(range(size))
        assert all(end == ends[0] for end in ends), ends
        assert ends[0]["val/square"] == sum(number**2 for number in range(size)) / size
        assert ends[0]["val/even"] == (size + 1) // 2 / size
        # The loss is a mean of each batch, which is rounded.
        assert ends[0]["val/loss"] == pytest.approx((size - 1) / 2, rel=1e-15)


def test_every_size_is_dealt_whole_to_any_number_of_ranks() -> None:
    for size in range(1, 258):
        for world_size in range(1, 9):
            parts = [evaluation_indices(size, rank=rank, world_size=world_size) for rank in range(world_size)]
            assert torch.equal(torch.cat(parts).sort().values, torch.arange(size)), (size, world_size)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 257),
    world_size=st.integers(1, 8),
    batch_size=st.integers(1, 300),
    is_even=st.booleans(),
)
@example(size=257, world_size=8, batch_size=7, is_even=False)
@example(size=257, world_size=8, batch_size=32, is_even=True)
@example(size=1, world_size=8, batch_size=1, is_even=True)
def test_the_result_is_that_of_one_process_for_any_size(
    monkeypatch: pytest.MonkeyPatch, size: int, world_size: int, batch_size: int, is_even: bool
) -> None:
    ranks = SimulatedRanks(world_size)
    monkeypatch.setattr(meter_module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(meter_module, "sum_over_ranks", ranks.sum)

    def one(context: Context) -> dict[str, float]:
        batches = loader(size, context, batch_size=batch_size, is_even=is_even)
        return evaluate(Square(), batches, task=Exact(), precision=FP32, context=context, prefix="val")

    ends: list[Any] = ranks.run(one)
    assert all(end == ends[0] for end in ends), ends
    assert ends[0]["val/square"] == sum(number**2 for number in range(size)) / size
    assert ends[0]["val/even"] == (size + 1) // 2 / size
    assert ends[0]["val/loss"] == pytest.approx((size - 1) / 2, rel=1e-15)


def test_names_bear_the_part() -> None:
    values = evaluate(
        Square(),
        loader(3, cpu_context(), batch_size=2),
        task=Exact(),
        precision=FP32,
        context=cpu_context(),
        prefix="test",
    )
    assert values.keys() == {"test/loss", "test/square", "test/even"}


class Watching:
    """What the world looks like from inside a validation step."""

    def __init__(self, look: Callable[[nn.Module, Any], None]) -> None:
        self.look = look

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.look(model, batch)
        return StepOutput(torch.zeros(()), 1)

    training_step = validation_step


def run(model: nn.Module, look: Callable[[nn.Module, Any], None], *, precision: PrecisionPlugin = FP32) -> None:
    batches = [MicroBatch(torch.ones(2, 3), 2)]
    context = cpu_context()
    evaluate(model, batches, task=Watching(look), precision=precision, context=context, prefix="val")


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_in_eval_mode_and_left_in_its_own(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).train(training)
    modes: list[bool] = []
    run(model, lambda model, _: modes.extend(module.training for module in model.modules()))
    assert modes == [False] * 3
    assert [module.training for module in model.modules()] == [training] * 3


def test_a_part_that_was_frozen_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()
    model[1].eval()
    run(model, lambda *_: None)
    assert model[0].training
    assert not model[1].training


def test_no_graph_is_built_and_gradients_stay() -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    outputs: list[Tensor] = []
    run(model, lambda model, batch: outputs.append(model(batch)))
    assert outputs[0].is_inference()
    assert not outputs[0].requires_grad
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize(
    ("precision", "batch", "output"),
    [
        (Precision.FP32, torch.float32, torch.float32),
        (Precision.BF16_MIXED, torch.float32, torch.bfloat16),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
        (Precision.FP64, torch.float64, torch.float64),
    ],
)
def test_it_computes_in_the_precision_asked_for(precision: Precision, batch: torch.dtype, output: torch.dtype) -> None:
    plugin = PrecisionPlugin(precision, device=CPU)
    seen: list[torch.dtype] = []
    run(
        plugin.convert_model(nn.Linear(3, 1)),
        lambda model, batch: seen.extend([batch.dtype, model(batch).dtype]),
        precision=plugin,
    )
    assert seen == [batch, output]


def test_evaluating_draws_from_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    evaluate(
        nn.Sequential(nn.Dropout(), Square()),
        loader(9, cpu_context(), batch_size=4),
        task=Exact(),
        precision=FP32,
        context=cpu_context(),
        prefix="val",
    )
    assert torch.equal(torch.get_rng_state(), before)
