"""strategy=pipeline: who has what, what is refused, and a window through the schedules with both stages in one process.

How ranks compute together: tests/multiproc/test_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.activations import recompute
from framework.config.schema import Precision
from framework.errors import ConfigError, FrameworkError, TargetError, TopologyError
from framework.precision import PrecisionPlugin
from framework.strategies import Pipeline
from framework.strategies.relay import Relay
from framework.strategies.schedules import Schedule, Schedules
from framework.types import DataShare, MicroBatch, StepOutput
from tests.unit.simulated_ranks import CPU, cpu_context
from tests.unit.small_trainer import Squares


def pipeline(rank: int = 0, *, world_size: int = 4, **options: Any) -> Pipeline:
    return Pipeline(context=cpu_context(rank, world_size=world_size), **options)


@pytest.mark.parametrize(
    ("options", "stages", "shares"),
    [
        ({}, 4, [(0, 1, 16)] * 4),
        ({"num_stages": 2}, 2, [(0, 2, 8), (1, 2, 8), (0, 2, 8), (1, 2, 8)]),
        ({"schedule": "interleaved"}, 8, [(0, 1, 16)] * 4),
        ({"schedule": "interleaved", "num_stages": 4, "num_microbatches": 2}, 4, [(0, 2, 2), (1, 2, 2)] * 2),
        ({"schedule": "gpipe", "num_microbatches": 1}, 4, [(0, 1, 1)] * 4),
    ],
)
def test_ranks_of_one_pipeline_see_the_same_samples(
    options: dict[str, Any], stages: int, shares: list[tuple[int, int, int]]
) -> None:
    made = [pipeline(rank, **options) for rank in range(4)]
    assert {each.num_stages for each in made} == {stages}
    assert [each.data_share for each in made] == [DataShare(*share) for share in shares]
    assert all(each.copies_gradients is (each.data_share.world_size > 1) for each in made)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"schedule": "zb"}, ConfigError, r"strategy\.schedule=zb: must be one of gpipe, 1f1b, interleaved"),
        ({"num_stages": 3}, TopologyError, r"takes 3 processes for one pipeline, and 4 aren't a multiple"),
        ({"num_stages": 1}, ConfigError, r"num_stages=1 puts the whole model on one process"),
        ({"num_stages": 0}, ConfigError, r"num_stages=0 isn't a multiple"),
        ({"num_stages": 5, "schedule": "interleaved"}, ConfigError, r"isn't a multiple of strategy\.stages_per_rank=2"),
        ({"stages_per_rank": 2}, ConfigError, r"schedule=1f1b has one stage on each rank"),
        ({"stages_per_rank": 1, "schedule": "interleaved"}, ConfigError, r"wants 2 or more stages on each rank"),
        ({"num_microbatches": 0}, ConfigError, r"num_microbatches=0 is below 1"),
        ({"bucket_cap_mb": -1}, ConfigError, r"strategy\.bucket_cap_mb=-1 must be 0"),
        ({"num_microbatches": 3}, ConfigError, r"wants one for each of the 4 ranks"),
        ({"num_microbatches": 6, "schedule": "interleaved"}, ConfigError, r"Use strategy\.num_microbatches=8"),
    ],
)
def test_what_does_not_go_together_is_told(options: dict[str, Any], kind: type[FrameworkError], said: str) -> None:
    with pytest.raises(kind, match=said):
        pipeline(**options)


def test_one_process_may_evaluate_and_not_train() -> None:
    alone = pipeline(world_size=1, num_stages=4)
    assert alone.data_share == DataShare(0, 1)
    with pytest.raises(TopologyError, match="on several processes, and there is one"):
        alone.wrap(nn.Sequential(nn.Linear(1, 1)))


def test_devices_that_cannot_be_are_refused() -> None:
    context = cpu_context(world_size=2)
    with pytest.raises(TopologyError, match="one device each, and these have 2"):
        Pipeline(context=replace(context, topology=replace(context.topology, span=2)))
    with pytest.raises(TopologyError, match="backend=gloo can't"):
        Pipeline(context=replace(context, topology=replace(context.topology, gpus_per_node=2)))


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def relay_of(model: nn.Sequential) -> Relay:
    """Both stages in this process: what they pass never leaves it."""
    group = dist.group.WORLD
    assert group is not None
    return Relay(model, {0: model[:2], 1: model[2:]}, num_stages=2, group=group, device=CPU)


def micro_batches(*sizes: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    return [
        MicroBatch((torch.randn(size, 3, generator=generator), torch.randn(size, generator=generator)), size)
        for size in sizes
    ]


def schedules_of(model: nn.Sequential) -> Schedules:
    return Schedules(relay_of(model), Schedule.INTERLEAVED)


def run(
    model: nn.Sequential,
    micros: Sequence[MicroBatch],
    *,
    number: int,
    task: Any = None,
    precision: Precision = Precision.FP32,
) -> list[StepOutput]:
    """A window whose micro-batches weigh their samples; what the task gave."""
    seen = []
    total = sum(micro.num_samples for micro in micros)

    def weighed(output_of: Callable[[Any], StepOutput], micro: MicroBatch) -> Tensor:
        seen.append(output_of(micro.batch))
        return seen[-1].loss * (micro.num_samples / total)

    schedules = schedules_of(model)
    plugin = PrecisionPlugin(precision, device=CPU)
    for _ in range(2):  # shapes are known in the second
        model.zero_grad()
        seen.clear()
        schedules.run(micros, number=number, task=task or Squares(), precision=plugin, weighed=weighed)
    return seen


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("sizes", "number"), [((2, 2), 2), ((3, 2, 2), 3), ((2, 1), 4)])
def test_uneven_micro_batches_give_the_gradients_of_all_samples(sizes: tuple[int, ...], number: int) -> None:
    """Some are filled up, and so is the window; a stand-in of no samples counts for nothing, whatever is in it."""
    micros = micro_batches(*sizes)
    if number > len(sizes):
        micros.append(MicroBatch((torch.full((1, 3), 9.0), torch.full((1,), float("nan"))), 0))
    model, whole = network(), network()
    outputs = run(model, micros, number=number)
    assert [output.num_samples for output in outputs] == list(sizes)
    inputs = torch.cat([micro.batch[0] for micro in micros if micro.num_samples])
    targets = torch.cat([micro.batch[1] for micro in micros if micro.num_samples])
    Squares().training_step(whole, (inputs, targets)).loss.backward()
    for mine, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


@pytest.mark.usefixtures("group")
def test_statistics_are_of_the_real_rows() -> None:
    """As in one process that takes the micro-batches one after another; the third is filled up, the fourth is empty."""

    def normed() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    micros = micro_batches(3, 3, 2)
    model, plain = normed(), normed()
    run(model, micros, number=4)
    for _ in range(2):
        plain.zero_grad()
        for batch, count in micros:
            (Squares().training_step(plain, batch).loss * (count / 8)).backward()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted)
    for mine, each in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, each.grad)


@pytest.mark.usefixtures("group", "own_state")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_what_is_computed_again_drops_the_same_and_gives_the_same_gradients(precision: Precision) -> None:
    gradients: list[list[Any]] = []
    for share, classes in ((0.5, None), (0.5, ["Linear", "Dropout"]), (0.0, None)):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(share), nn.Sequential(nn.Dropout(share), nn.Linear(8, 1)))
        recompute(model, classes)
        run(model, micro_batches(3, 2), number=2, precision=precision)
        gradients.append([each.grad for each in model.parameters()])
    kept, again, undropped = gradients
    assert all(map(torch.equal, kept, again))
    assert not all(map(torch.equal, kept, undropped))


@pytest.mark.usefixtures("group")
def test_schedules_are_kept_for_the_full_window_and_the_short_one() -> None:
    schedules, plugin = schedules_of(network()), PrecisionPlugin(Precision.FP32, device=CPU)
    made = []
    for size in (3, 2, 3, 2, 4, 5, 3):
        schedules.run(
            micro_batches(size, size),
            number=2,
            task=Squares(),
            precision=plugin,
            weighed=lambda output_of, micro: output_of(micro.batch).loss,
        )
        made.append(next(reversed(schedules._made.values())))
        assert len(schedules._made) <= 2
    assert made[0] is made[2]
    assert made[1] is made[3]
    assert made[6] is not made[0]


@pytest.mark.usefixtures("group")
def test_draws_of_the_device_are_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of a GPU that a task draws from before it calls the model."""
    asked: list[Any] = []

    def fingerprint(devices: list[Any]) -> int:
        asked.extend(devices)
        return len(asked)

    monkeypatch.setattr("framework.strategies.schedules.fingerprint", fingerprint)
    with pytest.raises(TargetError, match="draws random numbers before it calls the model"):
        run(network(), micro_batches(2, 2), number=2)
    assert asked == [CPU, CPU]


@pytest.mark.usefixtures("group")
def test_a_forward_passes_all_stages_and_wants_no_gradients() -> None:
    model = network()
    relay = relay_of(model)
    inputs = torch.randn(5, 3)
    with torch.no_grad():
        assert torch.equal(relay.forward(inputs), model(inputs))
    with pytest.raises(TargetError, match="a forward with gradients outside of a training step"):
        relay.forward(inputs)


@pytest.mark.usefixtures("group")
def test_to_find_shapes_moves_neither_statistics_nor_generators_nor_modes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    with torch.no_grad():
        relay_of(model).forward(torch.ones(3, 3))
    assert torch.equal(torch.rand(1), drawn)
    assert [module.training for module in model] == [False, True, True]
    assert model[1].num_batches_tracked == before["1.num_batches_tracked"] + 1  # of the forward itself


class Draws(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        return super().training_step(model, (inputs + torch.rand(1), targets))


class Mixes(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        return super().training_step(model, (inputs * numpy.random.beta(1, 1), targets))


class Twice(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        model(batch[0])
        return super().training_step(model, batch)


class Penalises(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        loss, count, _ = super().training_step(model, batch)
        return StepOutput(loss + sum(each.norm() for each in model.parameters()), count)


class Asks(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        assert model.head is not None
        return super().training_step(model, batch)


class Names(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(model(input=batch[0]).sum(), 1)


class Shuns(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(batch[0].sum(), 1)


class Odd(Squares):
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(model(batch[0], 3).sum(), 1)


@pytest.mark.usefixtures("group", "own_state")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Draws(), "draws random numbers before it calls the model"),
        (Mixes(), "draws random numbers before it calls the model"),
        (Twice(), "calls the model more than once"),
        (Penalises(), "asks the model for `parameters`"),
        (Asks(), "asks the model for `head`"),
        (Names(), "calls the model with input= by name"),
        (Shuns(), "didn't call the model"),
        (Odd(), r"gave a tensor of shape \(2, 3\), a int"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_task_that_a_pipeline_cannot_serve_is_told(task: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        run(network(), micro_batches(2, 2), number=2, task=task)


@pytest.mark.usefixtures("group")
def test_samples_of_several_shapes_in_one_window_are_refused() -> None:
    one, two = micro_batches(2, 2)
    longer = MicroBatch((torch.ones(2, 4), two.batch[1]), 2)
    with pytest.raises(TargetError, match="wants samples of one shape"):
        run(network(), [one, longer], number=2)


@pytest.mark.usefixtures("group")
def test_what_a_stage_gives_must_be_tensors() -> None:
    class Gives(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"x": input}

    model = nn.Sequential(Gives(3, 4), nn.Identity(), nn.Linear(4, 1))
    with (
        torch.no_grad(),
        pytest.raises(TargetError, match="must give a tensor or a tuple of tensors, and one gave a dict"),
    ):
        relay_of(model).forward(torch.ones(2, 3))
