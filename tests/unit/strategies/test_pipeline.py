"""strategy=pipeline: which samples and parameters a rank has, and tasks and models that it can't serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from framework.errors import TargetError
from framework.strategies import Pipeline
from framework.types import DataShare, MicroBatch, StepOutput, Window
from tests.helpers.contexts import CPU, cpu_context
from tests.helpers.internals import (
    Context,
    PrecisionPlugin,
    has_output,
    import_dynamo_late,
    is_model_sharded,
    num_parameters,
)
from tests.helpers.rank_pool import RankPool
from tests.unit.small_trainer import Squares

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]


@pytest.mark.parametrize(
    ("options", "stages", "shares"),
    [
        ({}, 4, [(0, 1, 16)] * 4),
        ({"num_stages": 2}, 2, [(0, 2, 8), (1, 2, 8), (0, 2, 8), (1, 2, 8)]),
        ({"schedule": "interleaved"}, 8, [(0, 1, 16)] * 4),
        ({"schedule": "interleaved", "num_stages": 4, "num_microbatches": 2}, 4, [(0, 2, 2), (1, 2, 2)] * 2),
    ],
    ids=str,
)
def test_ranks_of_one_pipeline_see_the_same_samples(
    options: dict[str, Any], stages: int, shares: list[tuple[int, int, int]]
) -> None:
    made = [Pipeline(context=cpu_context(rank, world_size=4), **options) for rank in range(4)]
    assert {each.num_stages for each in made} == {stages}
    for pipeline, share in zip(made, shares, strict=True):
        assert pipeline.data_share(cpu_context()) == DataShare(*share)


def cut(context: Context, widths: Sequence[int], frozen: int) -> tuple[list[str], list[str]]:
    """Give the names of this rank's parameters, and of all that its state dict has."""
    layers: list[nn.Module] = [nn.Linear(1, width, bias=False) for width in widths]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    model = nn.Sequential(*layers, nn.BatchNorm1d(1))
    total = sum(each.numel() for each in model.parameters())
    Pipeline(context=context).wrap(model)
    assert is_model_sharded(model)
    assert num_parameters(model) == total
    assert has_output(model) is (context.rank == context.world_size - 1)
    # BatchNorm, where it is another rank's, wants nothing of weights that are loaded.
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    return [name for name, _ in model.named_parameters()], list(model.state_dict())


@pytest.mark.parametrize(
    ("widths", "frozen", "wanted"),
    [
        ((2, 2, 2, 2), 0, ["01", "234"]),
        ((7, 1, 1, 1), 0, ["0", "1234"]),
        ((9, 1, 1), 1, ["01", "23"]),
        ((1, 1, 5, 1, 1), 0, ["01", "2", "345"]),
    ],
    ids=str,
)
def test_a_sequential_is_cut_evenly(
    rank_pool: RankPool, widths: tuple[int, ...], frozen: int, wanted: list[str]
) -> None:
    """Each stage has something to train; a rank's state has the names of the whole model."""
    ends = rank_pool.run(cut, widths, frozen, ranks=len(wanted))
    names_of_states: list[str] = []
    for (parameters, state), layers in zip(ends, wanted, strict=True):
        assert {name[0] for name in parameters} == set(layers)
        names_of_states += state
    names = {f"{number}.weight" for number in range(len(widths) + 1)}
    buffers = {f"{len(widths)}.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    last = f"{len(widths)}.bias"
    assert sorted(names_of_states) == sorted(names | buffers | {last})


class Draws(Squares):
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        return super().training_step(model, (inputs * self.draw(), targets))


def _of_torch() -> float:
    return float(torch.rand(1))


def _of_numpy() -> float:
    return numpy.random.beta(1, 1)


class Calls(Squares):
    """Does something else with the model than calling it once with a tensor."""

    def __init__(self, way: Callable[[Any, Tensor], Any]) -> None:
        self.way = way

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.way(model, batch[0])
        return StepOutput(batch[0].sum(), 1)


def _asks(model: Any, inputs: Tensor) -> Any:
    return model.head


def _names(model: Any, inputs: Tensor) -> Any:
    return model(input=inputs)


def _shuns(model: Any, inputs: Tensor) -> Any:
    return inputs


def _adds(model: Any, inputs: Tensor) -> Any:
    return model(inputs, 3)


def ignore(*_: object) -> None:
    return None


def refusal_of(context: Context, task: Any) -> str:
    """Give what every rank says of a step with this task."""
    strategy = Pipeline(context=context, num_microbatches=2)
    torch.manual_seed(0)
    model = strategy.wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    micros = iter([MicroBatch((torch.ones(2, 3), torch.ones(2)), 2)] * 2)
    import_dynamo_late()
    with pytest.raises(TargetError) as raised:
        strategy.run_window(
            model,
            Window(micros, 2, 4, epoch_end=False),
            task=task,
            precision=PrecisionPlugin("32-true", device=CPU),
            add=lambda output, *_: output.loss,
            mark=ignore,
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Draws(_of_torch), "draws random numbers before it calls the model"),
        (Draws(_of_numpy), "draws random numbers before it calls the model"),
        (Calls(_asks), "asks the model for `head`"),
        (Calls(_names), "calls the model with input= by name"),
        (Calls(_shuns), "didn't call the model"),
        (Calls(_adds), "a tensor of shape (2, 3), a int"),
    ],
)
def test_a_task_unsuited_to_pipelines_is_refused(rank_pool: RankPool, task: Any, message: str) -> None:
    assert all(message in refusal for refusal in rank_pool.run(refusal_of, task, ranks=2))


RECIPE = """
from framework import StepOutput

class Twice:
    def training_step(self, model, batch):
        return StepOutput((model(batch[0]) + model(batch[0])).sum(), len(batch[0]))
    validation_step = training_step
"""


@pytest.mark.exhaustive
def test_calling_the_model_twice_is_refused(
    train: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the rank of the last stage can see it."""
    (tmp_path / "asking.py").write_text(RECIPE)
    tasks = ("task._target_=asking.Twice", "~task.loss", "~task.metrics")
    stages = ("strategy=pipeline", "topology=single_node", "topology.procs_per_node=2", "logger=none")
    unwatched = ("trainer.check_val_every_n_epoch=null", "checkpoint=none")
    train("recipe=toy_model_parallel", *tasks, *stages, *unwatched, status=2)
    assert "calls the model more than once" in capfd.readouterr().err
