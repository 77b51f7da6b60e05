"""Trials of one rank: real steps of its own, and what ends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from framework.strategies.single import AsItIs
from framework.tune.dealing import Dealing
from framework.tune.searching import largest_fitting
from framework.tune.trying import Trials, Tried, all_tried, held_for_strategy
from tests.unit.simulated_ranks import CPU, cpu_context
from tests.unit.small_trainer import make_trainer, samples, settings

WORLD = 2


class FakeMemory:
    """Of a process with so much room, in which a sample takes so many bytes."""

    is_held = False

    def __init__(self, room: int | None, *, per_sample: int = 100, fixed: int = 0) -> None:
        self.room_bytes = room
        self.per_sample, self.fixed, self.size = per_sample, fixed, 0

    def clear(self) -> None:
        self.size = 0

    def peak_bytes(self) -> int | None:
        return self.fixed + self.per_sample * self.size


class Counting(nn.Linear):
    """Tells the memory how many samples it has seen at once, and has none for more than `most`."""

    def __init__(self, memory: FakeMemory, *, most: int = 10**6) -> None:
        super().__init__(3, 1)
        self.memory, self.most = memory, most
        self.seen: list[int] = []
        self.warmed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.memory.size = max(self.memory.size, len(x), self.warmed)
        self.warmed = 0
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has\n")
        return super().forward(x)


def trials(
    memory: FakeMemory,
    *,
    accumulate: int = 1,
    most: int = 10**6,
    context: Any = None,
    number: int = 400,
    global_batch_size: int | None = None,
    **options: Any,
) -> tuple[Trials, Counting]:
    model = Counting(memory, most=most)
    trainer = make_trainer(
        settings(accumulate_grad_batches=accumulate),
        model=model,
        data=samples(number),
        strategy=AsItIs(),
        context=cpu_context(1, world_size=WORLD) if context is None else context,
        optimizer=Adam,
    )
    dealing = Dealing(WORLD, accumulate, global_batch_size, number)
    return Trials(trainer, dealing, memory, steps=options.pop("steps", 2), **options), model


def test_a_trial_is_whole_steps_that_change_no_weight() -> None:
    tried, model = trials(FakeMemory(None), accumulate=4, steps=3)
    before = model.weight.detach().clone()
    found = tried.try_size(8)
    assert found.refusal is None
    assert found.step_s is not None
    assert model.seen == [8, 8] * 3  # two passes stand for four
    assert torch.equal(model.weight, before)
    (entry, _) = tried._trainer.parts.optimizer.state.values()
    assert (int(entry["step"]), model.weight.grad) == (3, None)


def test_the_first_step_is_not_measured() -> None:
    """Kernels are loaded in it, and a compiled model is compiled."""
    tried, model = trials(FakeMemory(None))
    model.warmed = 500
    assert tried.try_size(8).peak_bytes == 800


def test_out_of_memory_is_told_and_the_next_size_is_tried() -> None:
    tried, model = trials(FakeMemory(None), most=10)
    assert tried.try_size(11) == Tried("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", 1100)
    assert tried.try_size(10).refusal is None
    assert model.seen == [11, 10, 10]


def test_an_error_of_another_kind_passes() -> None:
    tried, model = trials(FakeMemory(None))
    model.most = -1
    model.forward = lambda x: x.no_such_thing  # type: ignore[method-assign,attr-defined]
    with pytest.raises(AttributeError, match="no_such_thing"):
        tried.try_size(4)


def test_what_is_expected_not_to_fit_is_not_begun() -> None:
    """Of a process without a limit of its own, the system would end one, and it needn't be this one."""
    tried, model = trials(FakeMemory(10_000, fixed=4000))
    fitting = [size for size in (8, 16, 32, 56, 64, 60, 61) if tried.try_size(size).refusal is None]
    assert fitting == [8, 16, 32, 56, 60]
    assert max(model.seen) == 60
    assert tried.try_size(200).refusal == "would take about 23.4 KiB of 9.8 KiB"


def test_one_measurement_refuses_nothing() -> None:
    """It may be of weights and the optimizer's state for the most part."""
    tried, model = trials(FakeMemory(10_000, fixed=4000))
    assert tried.try_size(30).refusal is None
    assert tried.try_size(60).refusal is None
    assert set(model.seen) == {30, 29, 60}


def test_a_second_measurement_is_never_of_one_sample() -> None:
    tried, model = trials(FakeMemory(10_000, fixed=9000))
    assert tried.try_size(2).refusal is None
    assert tried.try_size(8).refusal is None
    assert set(model.seen) == {2, 3, 8}


def test_a_second_measurement_that_is_too_much_refuses() -> None:
    tried, model = trials(FakeMemory(10_000, per_sample=4000))
    assert tried.try_size(2).refusal is None
    assert tried.try_size(5).refusal == "would take about 19.5 KiB of 9.8 KiB"
    assert set(model.seen) == {2, 3}


def test_what_no_batch_makes_larger_takes_no_room_from_it() -> None:
    tried, _ = trials(FakeMemory(10_000, fixed=6000, per_sample=1), number=10_000)

    def fits(size: int) -> bool:
        return tried.try_size(size).refusal is None

    found = largest_fitting(fits, start=32, most=5000, from_below=True)
    assert found is not None
    assert 3872 <= found <= 4000


def test_a_size_is_known_by_the_samples_that_were_in_a_pass() -> None:
    tried, model = trials(FakeMemory(10_000), global_batch_size=160)
    assert tried.try_size(72).refusal is None
    assert (max(model.seen), tried._peaks) == (40, {40: 4000})


def test_what_took_too_much_does_not_fit() -> None:
    tried, _ = trials(FakeMemory(1000))
    found = tried.try_size(16)
    assert (found.refusal, found.peak_bytes) == ("took 1.6 KiB of 1000 B", 1600)


def test_what_can_be_tried_is_tried() -> None:
    memory = FakeMemory(10_000)
    memory.is_held = True
    tried, model = trials(memory, most=60)
    assert tried.try_size(50).refusal is None
    assert str(tried.try_size(150).refusal).startswith("OutOfMemoryError")
    assert max(model.seen) == 150


def test_memory_that_the_strategy_needs_is_taken_meanwhile() -> None:
    tried, _ = trials(FakeMemory(None), held={CPU: 1 << 60})
    refusal = tried.try_size(1).refusal
    assert refusal is not None
    assert "allocate" in refusal


def test_bytes_for_a_strategy() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[0].bias.requires_grad_(False)
    gradients, buffers = 4 * (15 + 10), 4 * 10 + 8
    assert held_for_strategy(model, copies=2, averages=0) == {CPU: 2 * gradients}
    assert held_for_strategy(model, copies=1, averages=1) == {CPU: 2 * gradients + 4 * 5 + buffers}
    assert held_for_strategy(model, copies=0, averages=0) == {}


def test_alone_there_is_nobody_to_tell() -> None:
    assert all_tried(Tried(None), None, world_size=1) == [Tried(None)]
