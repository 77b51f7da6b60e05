"""Evaluation: every sample once, whatever the number of ranks, and training is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework.types import MicroBatch, StepOutput
from tests.helpers.contexts import CPU, cpu_context
from tests.helpers.internals import Context, Evaluator, Precision, PrecisionPlugin
from tests.helpers.loaders import eval_loader
from tests.helpers.rank_pool import RankPool

FP32 = PrecisionPlugin("32-true", device=CPU)


class Exact:
    """Whole numbers, so that no order of sums can change the result; keeps which samples it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        (numbers,) = batch
        self.seen += numbers.tolist()
        count = len(numbers)
        squares = model(numbers.double().unsqueeze(1)).sum()
        even = (numbers % 2 == 0).sum()
        return StepOutput(numbers.double().mean(), count, {"square": (squares, count), "even": (even, count)})

    training_step = validation_step


class Square(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return numbers.square()


def evaluate_sizes(context: Context, batch_size: int, is_even: bool) -> list[tuple[dict[str, float], list[int]]]:
    found = []
    place: Any = {"rank": context.rank, "world_size": context.world_size}
    for size in (1, 2, 3, 7, 8, 22, 29):
        dataset = TensorDataset(torch.arange(size))
        task = Exact()
        batches = eval_loader(dataset, batch_size=batch_size, is_even=is_even, **place)
        values = Evaluator(model=Square(), task=task, precision=FP32, context=context).evaluate({"val": batches})
        found.append((values.metrics, task.seen))
    return found


@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_sample_counts_once_on_any_ranks(rank_pool: RankPool, ranks: int, is_even: bool) -> None:
    for batch_size in (1, 7):
        ends = [evaluate_sizes(cpu_context(), batch_size, is_even)]
        if ranks > 1:
            ends = rank_pool.run(evaluate_sizes, batch_size, is_even, ranks=ranks)
        for of_ranks in zip(*ends, strict=True):
            numbers = sorted(number for _, seen in of_ranks for number in seen)
            size = len(set(numbers))
            assert is_even or numbers == list(range(size))
            exact = {"val/square": sum(n**2 for n in range(size)) / size, "val/even": (size + 1) // 2 / size}
            for values, _ in of_ranks:
                # The loss is a mean of each batch, which is rounded.
                assert values == {**exact, "val/loss": pytest.approx((size - 1) / 2, rel=1e-15)}


class Watching:
    """Looks at the model and the batch from inside a validation step."""

    def __init__(self, look: Callable[[nn.Module, Any], None]) -> None:
        self.look = look

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.look(model, batch)
        return StepOutput(torch.zeros(()), 1)

    training_step = validation_step


def run(model: nn.Module, look: Callable[[nn.Module, Any], None], *, precision: PrecisionPlugin = FP32) -> None:
    batches = [MicroBatch(torch.ones(2, 3), 2)]
    evaluator = Evaluator(model=model, task=Watching(look), precision=precision, context=cpu_context())
    evaluator.evaluate({"val": batches})


def test_evaluation_restores_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3), nn.Linear(3, 1)).train()
    # This part is frozen.
    model[1].eval()
    modes: list[bool] = []
    outputs: list[Tensor] = []

    def look(model: nn.Module, batch: Any) -> None:
        modes.extend(module.training for module in model.modules())
        outputs.append(model(batch))

    run(model, look)
    assert modes == [False] * 4
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert not outputs[0].requires_grad
    assert not outputs[0].is_inference()


def test_a_failed_evaluation_restores_them_too() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 1)).train()

    def fail(model: nn.Module, batch: Any) -> None:
        raise ValueError("of the model's own")

    with pytest.raises(ValueError, match="of the model's own"):
        run(model, fail)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("precision", "batch", "output"),
    [
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
    ],
)
def test_it_computes_in_the_precision_asked_for(precision: Precision, batch: torch.dtype, output: torch.dtype) -> None:
    plugin = PrecisionPlugin(precision, device=CPU)
    seen = list[torch.dtype]()
    model = plugin.convert_model(nn.Linear(3, 1))
    run(model, lambda model, batch: seen.extend([batch.dtype, model(batch).dtype]), precision=plugin)
    assert seen == [batch, output]


class Appends:
    """A metric that keeps what it is given, as torchmetrics' do that need all samples."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def reset(self) -> None:
        self.values = []

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def state(self) -> list[float]:
        return [float(value) for value in self.values]

    def merge(self, state: list[float]) -> None:
        self.values += map(torch.tensor, state)

    def compute(self) -> float:
        return float(sum(self.values))


class Overwrites:
    """Returns the same memory for every batch, as a CUDA graph does."""

    def __init__(self) -> None:
        self.memory = torch.zeros(())
        self.metrics = {"appended": Appends()}

    def validation_step(self, model: nn.Module, batch: Tensor) -> StepOutput:
        self.memory.copy_(batch.sum())
        sums = {"sum": (self.memory, 1)}
        return StepOutput(self.memory, 1, sums, weight=self.memory, updates={"appended": (self.memory,)})

    training_step = validation_step


def test_outputs_of_a_cuda_graph_are_kept() -> None:
    batches = [MicroBatch(torch.tensor([value]), 1) for value in (1.0, 2.0, 3.0)]
    evaluator = Evaluator(
        model=Square(), task=Overwrites(), precision=FP32, context=cpu_context(), captures_graphs=True
    )
    found = evaluator.evaluate({"val": batches})
    squares = 1 + 4 + 9
    assert found.metrics == {"val/sum": 2.0, "val/appended": 6.0, "val/loss": squares / 6}
