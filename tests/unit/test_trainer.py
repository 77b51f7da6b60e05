from __future__ import annotations

import copy
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from framework import ending as ending_module
from framework import finite as finite_module
from framework import meter as meter_module
from framework import progress as progress_module
from framework import timing as timing_module
from framework import trainer as trainer_module
from framework.checkpoint import find, load, read_manifest
from framework.config.schema import ClipAlgorithm, Interval, Precision
from framework.data.sampler import GlobalOrder
from framework.distributed.context import Context
from framework.errors import RunError
from framework.launch.board import Board
from framework.seed import restore_generator_states
from framework.trainer import Trainer
from framework.types import Callback, EvalReport, FitInfo, StepOutput, StepReport, Stop
from tests.unit.simulated_ranks import CPU, SimulatedRanks, cpu_context
from tests.unit.small_trainer import (
    BATCH,
    SIZE,
    STEPS_PER_EPOCH,
    Marks,
    Numbers,
    Squares,
    linear,
    link,
    make_trainer,
    manager,
    samples,
    saved_steps,
    settings,
)

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a checkpoint outlives a power cut is tested where it is written; here it would only take time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def still(parameters: Any) -> SGD:
    """Nothing is learned, so what is logged can be computed from the first weights."""
    return SGD(parameters, lr=0.0)


def weights(trainer: Trainer) -> list[Tensor]:
    return [tensor.clone() for tensor in trainer.parts.bare_model.state_dict().values()]


def assert_equal(given: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(given) == len(wanted)
    for one, other in zip(given, wanted, strict=True):
        assert torch.equal(one, other)


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, as the loop should see them."""
    data = samples()
    for indices in GlobalOrder(SIZE, seed=0, shuffle=True).indices(epoch).split(BATCH):
        yield data[indices]


def plain_loop(step: Callable[[nn.Module, Optimizer], None], *, epochs: int = 2, momentum: float = 0.0) -> list[Tensor]:
    """What anyone would write; `step` is called between backward and `zero_grad`."""
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=momentum)
    for epoch in range(epochs):
        for inputs, targets in batches(epoch):
            (model(inputs).squeeze(1) - targets).square().mean().backward()
            step(model, optimizer)
            optimizer.zero_grad()
    return list(model.state_dict().values())


# What is trained


def test_it_is_the_loop_anyone_would_write() -> None:
    trainer = make_trainer()
    trainer.fit()
    assert_equal(weights(trainer), plain_loop(lambda _, optimizer: optimizer.step()))
    assert (trainer.progress.step, trainer.progress.epoch, trainer.progress.samples) == (2 * STEPS_PER_EPOCH, 2, 0)


@pytest.mark.parametrize("steps", [1, 4, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_max_steps_ends_in_the_middle_of_an_epoch(steps: int) -> None:
    numbers = Numbers()
    trainer = make_trainer(settings(max_steps=steps), loggers={"numbers": numbers})
    trainer.fit()
    epoch, within = divmod(steps, STEPS_PER_EPOCH)
    assert trainer.progress.step == steps
    assert (trainer.progress.epoch, trainer.progress.samples) == (epoch, within * BATCH)
    assert [step for step, _ in numbers.of("train")] == list(range(1, steps + 1))
    assert trainer.last_epoch == (steps - 1) // STEPS_PER_EPOCH


def test_what_is_reached_already_trains_nothing() -> None:
    trainer = make_trainer(settings(max_steps=3))
    trainer.progress.step = 3
    before = weights(trainer)
    trainer.fit()
    assert_equal(weights(trainer), before)
    assert trainer.progress.step == 3


def test_after_the_first_step_of_each_beginning_the_time_out_is_changed_once() -> None:
    calls: list[int] = []
    trainer = make_trainer(settings(max_steps=4), after_first_step=lambda: calls.append(trainer.progress.step))
    trainer.fit()
    assert calls == [1]
    again = make_trainer(settings(max_steps=8), after_first_step=lambda: calls.append(again.progress.step))
    again.progress.load_state_dict(trainer.progress.state_dict())
    again.fit()
    assert calls == [1, 5]


# Accumulation


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_accumulated_gradients_are_those_of_the_whole_batch(accumulate: int) -> None:
    """The last step of an epoch has fewer samples and fewer, uneven micro-batches: it still counts each one once."""
    given: list[list[Tensor]] = []
    trainer = make_trainer(settings(accumulate_grad_batches=accumulate, max_epochs=1), optimizer=still)
    keep_gradients(trainer, given)
    trainer.fit()
    data, order = samples(), GlobalOrder(SIZE, seed=0, shuffle=True).indices(0)
    windows = order.split(BATCH * accumulate)
    assert len(given) == len(windows)
    for gradients, indices in zip(given, windows, strict=True):
        model = linear()
        inputs, targets = data[indices]
        (model(inputs).squeeze(1) - targets).square().mean().backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6)


def test_a_stand_in_weighs_nothing_and_is_not_counted() -> None:
    """Two simulated ranks and a last global batch of one sample: rank 1 computes a loss that changes nothing."""
    given: list[list[Tensor]] = []
    context = cpu_context(1, world_size=2)
    trainer = make_trainer(settings(max_epochs=1), data=samples(9), context=context, optimizer=still)
    keep_gradients(trainer, given)
    counts = []
    for window in trainer.train_loader.epoch(0):
        counts.append(window.global_count)
        trainer.train_step(window)
    assert counts == [8, 1]
    assert [gradient.abs().sum() > 0 for gradient in given[0]] == [True, True]
    assert [gradient.abs().sum() > 0 for gradient in given[1]] == [False, False]
    assert trainer._meter._series["loss"].count == 4


def keep_gradients(trainer: Trainer, given: list[list[Tensor]]) -> None:
    trainer.parts.optimizer.register_step_pre_hook(
        lambda *_: given.append([p.grad.clone() for p in trainer.parts.model.parameters() if p.grad is not None])
    )


# Clipping


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        (ClipAlgorithm.NORM, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5)),
        (ClipAlgorithm.VALUE, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.5)),
    ],
)
def test_clipping_changes_weights_as_torchs_does(algorithm: ClipAlgorithm, clip: Callable[[nn.Module], Any]) -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> None:
        clip(model)
        optimizer.step()

    trainer = make_trainer(settings(gradient_clip_val=0.5, gradient_clip_algorithm=algorithm))
    trainer.fit()
    clipped = plain_loop(step)
    assert_equal(weights(trainer), clipped)
    assert not torch.equal(clipped[0], plain_loop(lambda _, optimizer: optimizer.step())[0])


def test_scaled_gradients_are_clipped_and_measured_as_they_are_without_the_scale() -> None:
    """A scale is a power of two, so the weights are the same to the bit as with torch's own loop."""
    numbers = Numbers()
    trainer = make_trainer(
        settings(gradient_clip_val=0.5), precision=Precision.FP16_MIXED, loggers={"numbers": numbers}
    )
    trainer.fit()
    scaler = torch.amp.GradScaler("cpu")
    model, norms = linear(), []
    optimizer = SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(inputs).squeeze(1) - targets).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert trainer.parts.precision.scaler.get_scale() == scaler.get_scale() > 1.0
    assert_equal(weights(trainer), list(model.state_dict().values()))
    # As text: the first scale is too large, so the first norms are NaN and infinite, and those steps are left out.
    assert [str(values["train/grad_norm"]) for _, _, values in numbers.logged] == [str(norm) for norm in norms]


def test_a_schedule_stands_still_in_the_steps_that_a_scaler_leaves_out() -> None:
    steps: list[int] = []

    def counted(parameters: Any) -> SGD:
        optimizer = SGD(parameters, lr=0.05)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    trainer = make_trainer(
        settings(max_epochs=3),
        precision=Precision.FP16_MIXED,
        optimizer=counted,
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
        interval=Interval.STEP,
    )
    trainer.fit()
    assert 0 < len(steps) < trainer.progress.step  # the first scale is too large
    assert trainer.parts.schedule.state_dict()["last_epoch"] == len(steps)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_logged_norm_is_of_the_gradients_before_clipping(clip: float | None) -> None:
    numbers = Numbers()
    trainer = make_trainer(settings(gradient_clip_val=clip, max_steps=1), loggers={"numbers": numbers}, optimizer=still)
    trainer.fit()
    model = linear()
    inputs, targets = next(batches(0))
    (model(inputs).squeeze(1) - targets).square().mean().backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert numbers.logged[0][2]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)


# Logging


@pytest.mark.parametrize(
    ("every", "logged"),
    [
        (1, list(range(1, 11))),
        (4, [4, 8, 10]),  # what is left at the end
        (5, [5, 10]),
        (100, [10]),
    ],
)
def test_it_logs_every_n_steps_and_what_is_left(every: int, logged: list[int]) -> None:
    numbers = Numbers()
    make_trainer(settings(log_every_n_steps=every, max_steps=10), loggers={"numbers": numbers}).fit()
    assert numbers.of("train") == [(step, (step - 1) // STEPS_PER_EPOCH) for step in logged]


def test_what_is_logged_is_the_mean_over_all_samples_since_the_last_time() -> None:
    numbers = Numbers()
    trainer = make_trainer(settings(log_every_n_steps=4, max_epochs=1), loggers={"numbers": numbers}, optimizer=still)
    trainer.fit()
    errors = [(linear()(inputs).squeeze(1) - targets).square().detach() for inputs, targets in batches(0)]
    assert numbers.losses().keys() == {4, 6}
    assert numbers.losses()[4] == pytest.approx(torch.cat(errors[:4]).mean().item(), rel=1e-6)
    assert numbers.losses()[6] == pytest.approx(torch.cat(errors[4:]).mean().item(), rel=1e-6)  # 4 and 2 samples


def test_the_learning_rate_logged_is_the_one_that_was_used() -> None:
    numbers = Numbers()
    make_trainer(
        settings(max_steps=3),
        loggers={"numbers": numbers},
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 0.1**step),
        interval=Interval.STEP,
    ).fit()
    assert [values["train/lr"] for _, _, values in numbers.logged] == pytest.approx([0.05, 0.005, 0.0005])


def test_a_schedule_moves_by_steps_or_by_epochs() -> None:
    rates = {}
    for interval in Interval:
        numbers = Numbers()
        make_trainer(
            loggers={"numbers": numbers},
            scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
            interval=interval,
        ).fit()
        rates[interval] = [values["train/lr"] for _, _, values in numbers.logged]
    assert rates[Interval.EPOCH] == [0.05] * STEPS_PER_EPOCH + [0.025] * STEPS_PER_EPOCH
    assert rates[Interval.STEP] == [0.05 * 0.5**step for step in range(2 * STEPS_PER_EPOCH)]


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Squares):
    """A step takes 1 s and a batch of validation 1,000."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.clock.now += 1.0
        return super().training_step(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.clock.now += 1000.0
        return super().training_step(model, batch)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_throughput_is_of_the_time_spent_training(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    clock, numbers = Clock(), Numbers()
    for module in (trainer_module, progress_module):
        monkeypatch.setattr(module, "time", clock)
    how = settings(log_every_n_steps=every, max_epochs=1)
    make_trainer(how, task=Slow(clock), loggers={"numbers": numbers}, val=samples(5)).fit()
    rates = [values["train/samples_per_s"] for _, _, values in numbers.logged if "train/loss" in values]
    assert rates[0] == pytest.approx(BATCH)
    assert rates[-1] == pytest.approx((SIZE - BATCH * (STEPS_PER_EPOCH - every)) / every)


def test_throughput_is_right_also_where_evaluation_and_save_come_between_two_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, numbers = Clock(), Numbers()
    for module in (trainer_module, progress_module):
        monkeypatch.setattr(module, "time", clock)
    make_trainer(
        settings(log_every_n_steps=100, max_epochs=1),
        task=Slow(clock),
        loggers={"numbers": numbers},
        val=samples(5),
        checkpoints=manager(tmp_path, monitor="val/loss"),
    ).fit()
    (rate,) = [values["train/samples_per_s"] for _, _, values in numbers.logged if "train/loss" in values]
    assert rate == pytest.approx(SIZE / STEPS_PER_EPOCH)


# Evaluation


@pytest.mark.parametrize(
    ("changes", "evaluated"),
    [
        ({"check_val_every_n_epoch": 1, "max_epochs": 3}, [6, 12, 18]),
        ({"check_val_every_n_epoch": 2, "max_epochs": 5}, [12, 24]),
        ({"check_val_every_n_epoch": None, "max_epochs": 3}, []),
        ({"val_check_interval": 4, "max_epochs": 2}, [4, 8, 12]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None, "max_steps": 11}, [5, 10]),
        ({"check_val_every_n_epoch": 1, "max_steps": 8}, [6]),
    ],
)
def test_it_evaluates_when_it_is_due(changes: dict[str, Any], evaluated: list[int]) -> None:
    numbers = Numbers()
    make_trainer(settings(**changes), loggers={"numbers": numbers}, val=samples(7)).fit()
    assert numbers.of("val") == [(step, (step - 1) // STEPS_PER_EPOCH) for step in evaluated]


def test_an_evaluation_is_the_mean_over_all_samples_and_is_kept() -> None:
    numbers, data = Numbers(), samples(7)
    trainer = make_trainer(settings(max_epochs=1), loggers={"numbers": numbers}, val=data, optimizer=still)
    trainer.fit()
    inputs, targets = data[:]
    expected = (linear()(inputs).squeeze(1) - targets).square().mean().item()
    assert trainer.val_metrics == {"val/loss": pytest.approx(expected, rel=1e-6)}
    assert numbers.logged[-1][2] == trainer.val_metrics


def test_evaluation_leaves_training_as_it_was() -> None:
    """With dropout: the same numbers are drawn in training whether or not it evaluates."""
    ends = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), linear())
        torch.manual_seed(1)
        trainer = make_trainer(
            settings(val_check_interval=every, check_val_every_n_epoch=None), model=model, val=samples(7)
        )
        trainer.fit()
        assert trainer.parts.model.training
        ends.append(weights(trainer))
    assert_equal(*ends)


# Saving


@pytest.mark.parametrize(
    ("how", "keep", "saved"),
    [
        ({"max_epochs": 2}, {"every_n_epochs": 1}, [6, 12]),
        ({"max_epochs": 3}, {"every_n_epochs": 2}, [12, 18]),  # and the end
        ({"max_steps": 10}, {"every_n_steps": 4}, [4, 8, 10]),
        ({"max_steps": 10}, {}, [10]),
        ({"max_epochs": 2}, {"every_n_epochs": 1, "every_n_steps": 6}, [6, 12]),
        ({"max_steps": 10, "val_check_interval": 3}, {"monitor": "val/loss"}, [3, 6, 9, 10]),
        ({"max_epochs": 2}, {"enabled": False, "every_n_steps": 1}, []),
    ],
)
def test_it_saves_when_it_is_due_and_at_the_end(
    tmp_path: Path, how: dict[str, Any], keep: dict[str, Any], saved: list[int]
) -> None:
    make_trainer(settings(**how), val=samples(7), checkpoints=manager(tmp_path, **keep)).fit()
    assert saved_steps(tmp_path) == saved


def test_a_checkpoint_holds_metrics_only_of_its_own_weights(tmp_path: Path) -> None:
    numbers = Numbers()
    how = settings(max_steps=6, val_check_interval=3)
    keep = manager(tmp_path, every_n_steps=1, monitor="val/loss")
    make_trainer(how, val=samples(7), loggers={"numbers": numbers}, checkpoints=keep).fit()
    evaluated = {step: values for step, _, values in numbers.logged if "val/loss" in values}
    manifests = {step: read_manifest(tmp_path / f"step_{step:08d}") for step in range(1, 7)}
    assert {step: dict(manifest.metrics) for step, manifest in manifests.items()} == {
        step: evaluated.get(step, {}) for step in range(1, 7)
    }


def test_what_is_logged_does_not_depend_on_when_it_is_saved(tmp_path: Path) -> None:
    numbers, plain = Numbers(), Numbers()
    how = settings(log_every_n_steps=5, max_steps=12)
    make_trainer(how, loggers={"numbers": plain}).fit()
    make_trainer(how, loggers={"numbers": numbers}, checkpoints=manager(tmp_path, every_n_steps=3)).fit()
    assert [step for step, _ in numbers.of("train")] == [5, 10, 12]
    assert without_speed(numbers) == without_speed(plain)
    for step in (3, 6, 9):
        later = Numbers()
        resumed = make_trainer(how, loggers={"numbers": later})
        state = load(tmp_path / f"step_{step:08d}", map_location="cpu")
        resumed.parts.bare_model.load_state_dict(state["model"])
        resumed.load_state_dict(state["training"])
        resumed.fit()
        assert without_speed(later) == [row for row in without_speed(plain) if row[0] > step]


def test_what_was_logged_is_written_before_a_checkpoint_counts(tmp_path: Path) -> None:
    class Buffering(Numbers):
        """Writes late, as TensorBoard's does."""

        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[tuple[int, list[int]]] = []

        def flush(self) -> None:
            self.flushed.append((len(self.logged), saved_steps(tmp_path)))

    logger = Buffering()
    how = settings(max_steps=4)
    make_trainer(how, loggers={"numbers": logger}, checkpoints=manager(tmp_path, every_n_steps=2)).fit()
    assert logger.flushed == [(2, []), (4, [2])]


# Trouble


class BadAt(Squares):
    """A loss that isn't finite at a step; or one that is, with gradients that aren't."""

    def __init__(self, step: int, *, value: float = math.nan, gradient_only: bool = False) -> None:
        self.step, self.value, self.gradient_only, self.steps = step, value, gradient_only, 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.steps += 1
        output = super().training_step(model, batch)
        if self.steps != self.step:
            return output
        if self.gradient_only:  # the derivative of a square root at 0
            return output._replace(loss=output.loss + (output.loss - output.loss.detach()).sqrt())
        return output._replace(loss=output.loss * self.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("bad", "log_every", "save_every"), [(7, 5, 5), (1, 100, 100), (7, 100, 2), (12, 100, 5)])
def test_a_loss_that_is_not_finite_stops_with_its_step_and_nothing_is_saved_after(
    tmp_path: Path, value: float, bad: int, log_every: int, save_every: int
) -> None:
    trainer = make_trainer(
        settings(log_every_n_steps=log_every),
        task=BadAt(bad, value=value),
        checkpoints=manager(tmp_path, every_n_steps=save_every),
    )
    with pytest.raises(RunError, match=rf"since step {bad} \(epoch \d\)"):
        trainer.fit()
    assert saved_steps(tmp_path) == [step for step in range(1, bad) if step % save_every == 0]


def test_a_bad_loss_is_found_at_the_end_at_the_latest_also_without_checkpoints() -> None:
    with pytest.raises(RunError, match="since step 12 "):
        make_trainer(settings(log_every_n_steps=100), task=BadAt(12)).fit()


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    trainer = make_trainer(task=BadAt(7, gradient_only=True), checkpoints=manager(tmp_path, every_n_steps=1))
    with pytest.raises(RunError):
        trainer.fit()
    for step in saved_steps(tmp_path):
        model = load(tmp_path / f"step_{step:08d}", map_location="cpu", parts=["model"])["model"]
        assert all(tensor.isfinite().all() for tensor in model.values()), step


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_what_a_task_raises_passes(where: str) -> None:
    task = Squares()

    def fail(*_: Any) -> StepOutput:
        raise ZeroDivisionError("in the task")

    setattr(task, where, fail)
    with pytest.raises(ZeroDivisionError, match="in the task"):
        make_trainer(task=task, val=samples(7)).fit()


# Observers


class Recorder:
    """Writes down every call; answers what the test wants."""

    def __init__(self, stop_at: dict[str, int] | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stop_at = stop_at or {}
        self.averaged = 0.0

    def on_fit_start(self, info: FitInfo) -> None:
        self.calls.append(("on_fit_start", info))

    def on_train_step_end(self, report: StepReport) -> Stop | None:
        self.calls.append(("on_train_step_end", report))
        return Stop("seen enough") if self.stop_at.get("step") == report.step else None

    def on_validation_end(self, report: EvalReport) -> Stop | None:
        self.calls.append(("on_validation_end", report))
        return Stop("good enough") if self.stop_at.get("validation") == report.step else None

    def on_fit_end(self) -> None:
        self.calls.append(("on_fit_end", None))

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(("state_dict", None))
        return {"steps": len(self.named("on_train_step_end"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(("load_state_dict", state))

    def named(self, name: str) -> list[Any]:
        return [value for call, value in self.calls if call == name]


def test_observers_are_told_what_the_contract_says(tmp_path: Path) -> None:
    recorder = Recorder()
    model = linear()
    trainer = make_trainer(
        settings(max_epochs=2, max_steps=100),
        model=model,
        callbacks={"recorder": recorder},
        val=samples(7),
        checkpoints=manager(tmp_path),
        optimizer=still,
    )
    trainer.fit()
    info = recorder.calls[0][1]
    assert info == FitInfo(model, 0, 12, STEPS_PER_EPOCH, max_epochs=2, optimizer=trainer.parts.optimizer)
    epoch = ["on_train_step_end"] * STEPS_PER_EPOCH + ["on_validation_end"]
    assert [name for name, _ in recorder.calls] == ["on_fit_start", *epoch, *epoch, "state_dict", "on_fit_end"]
    steps = recorder.named("on_train_step_end")
    assert [(report.step, report.epoch) for report in steps] == [(n + 1, n // STEPS_PER_EPOCH) for n in range(12)]
    assert [report.global_count for report in steps] == [4, 4, 4, 4, 4, 2] * 2
    assert not any(report.loss.requires_grad for report in steps)
    for report, (inputs, targets) in zip(steps, batches(0), strict=False):
        assert report.loss.item() == pytest.approx((model(inputs).squeeze(1) - targets).square().mean().item())
    evaluations = recorder.named("on_validation_end")
    assert [(report.part, report.step, report.epoch) for report in evaluations] == [("val", 6, 0), ("val", 12, 1)]
    assert evaluations[-1].metrics == trainer.val_metrics


def test_a_hook_that_nobody_wrote_is_not_called() -> None:
    class OnlyAtTheEnd(Callback):
        ended = 0

        def on_fit_end(self) -> None:
            self.ended += 1

    only = OnlyAtTheEnd()  # what is left out is empty
    trainer = make_trainer(callbacks={"only": only, "nothing": object()}, val=samples(7))
    assert trainer._bind() == []
    trainer.fit()
    assert only.ended == 1


def test_loggers_may_hear_of_the_start_and_of_every_step() -> None:
    class Progressing(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def fit_start(self, info: FitInfo) -> None:
            self.heard.append(info.total_steps)

        def step(self, report: StepReport) -> None:
            self.heard.append(report.step)

    logger = Progressing()
    make_trainer(settings(max_steps=3), loggers={"one": logger, "other": Numbers()}).fit()
    assert logger.heard == [3, 1, 2, 3]


@pytest.mark.parametrize("at", [3, STEPS_PER_EPOCH, 8])
def test_a_callback_stops_training_after_its_step(tmp_path: Path, at: int) -> None:
    recorder = Recorder({"step": at})
    trainer = make_trainer(callbacks={"recorder": recorder}, checkpoints=manager(tmp_path))
    trainer.fit()
    assert trainer.progress.step == at
    assert trainer.ending.reason == "seen enough"
    assert recorder.calls[-1][0] == "on_fit_end"
    assert saved_steps(tmp_path) == [at]


def test_a_callback_stops_training_after_an_evaluation() -> None:
    recorder = Recorder({"validation": 4})
    trainer = make_trainer(settings(val_check_interval=2), callbacks={"recorder": recorder}, val=samples(7))
    trainer.fit()
    assert (trainer.progress.step, trainer.ending.reason) == (4, "good enough")


class Averaged:
    """Evaluates with weights that are all 2."""

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        trained = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        yield
        model.load_state_dict(trained)


def test_a_callbacks_weights_are_evaluated_and_kept_and_training_goes_on_with_its_own(tmp_path: Path) -> None:
    data = samples(7)
    trainer = make_trainer(callbacks={"averaged": Averaged()}, val=data, checkpoints=manager(tmp_path))
    trainer.fit()
    trained = plain_loop(lambda _, optimizer: optimizer.step())
    assert_equal(weights(trainer), trained)
    inputs, targets = data[:]
    expected = (2.0 * inputs.sum(dim=1) + 2.0 - targets).square().mean().item()
    assert trainer.val_metrics["val/loss"] == pytest.approx(expected, rel=1e-6)
    state = load(find(tmp_path), map_location="cpu")
    assert all((tensor == 2.0).all() for tensor in state["model"].values())
    assert_equal(list(state["training"]["model"].values()), trained)


# What is seen from outside, and what outside asks for


def test_the_pulse_tells_what_is_being_done(tmp_path: Path) -> None:
    marks = Marks()
    how = settings(max_steps=2, accumulate_grad_batches=2, log_every_n_steps=100, val_check_interval=2)
    make_trainer(how, val=samples(7), checkpoints=manager(tmp_path), watched=link(marks)).fit()
    micro_batches = ["forward", "backward", "data"] * 2
    assert marks.seen == [
        *("data", *micro_batches, "optimizer", 1, "logging"),
        *("data", *micro_batches, "optimizer", 2, "logging", "evaluate", "data"),
        *("checkpoint", "logging", "checkpoint"),  # what is left at the end, and until that is written
    ]


class AskAt:
    """A callback that has this rank asked to stop after a step, as a watcher does from outside."""

    def __init__(self, marks: Marks, step: int) -> None:
        self.marks, self.step = marks, step

    def on_train_step_end(self, report: StepReport) -> None:
        if report.step == self.step:
            self.marks.asked_to_stop = signal.SIGTERM


@pytest.mark.parametrize("saved_already", [True, False])
def test_a_rank_alone_stops_at_once_when_asked_and_its_checkpoint_is_of_that_step(
    tmp_path: Path, saved_already: bool
) -> None:
    marks = Marks()
    trainer = make_trainer(
        callbacks={"ask": AskAt(marks, 3)},
        checkpoints=manager(tmp_path, every_n_steps=3 if saved_already else None),
        watched=link(marks),
    )
    trainer.fit()
    assert trainer.ending.was_stopped
    assert (trainer.ending.stopped_by, trainer.ending.reason, trainer.progress.step) == ("SIGTERM", None, 3)
    assert saved_steps(tmp_path) == [3]
    assert marks.seen.count("checkpoint") == 2  # to save it, and to wait until it is written


def test_stopped_and_gone_on_with_it_ends_as_if_never_stopped(tmp_path: Path) -> None:
    whole = make_trainer()
    whole.fit()
    marks = Marks()
    stopped = make_trainer(callbacks={"ask": AskAt(marks, 7)}, checkpoints=manager(tmp_path), watched=link(marks))
    stopped.fit()
    state = load(find(tmp_path), map_location="cpu")
    resumed = make_trainer()
    resumed.parts.bare_model.load_state_dict(state["model"])
    resumed.load_state_dict(state["training"])
    resumed.fit()
    assert resumed.progress == whole.progress
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("end", ["last step", "callback"])
def test_a_request_at_the_end_of_training_changes_nothing(end: str) -> None:
    marks = Marks()
    step = 12 if end == "last step" else 4
    callbacks = {"ask": AskAt(marks, step), "recorder": Recorder(None if end == "last step" else {"step": 4})}
    trainer = make_trainer(callbacks=callbacks, watched=link(marks))
    trainer.fit()
    assert trainer.progress.step == step
    assert not trainer.ending.was_stopped
    assert trainer.ending.stopped_by is None


# Several ranks agree


def run_ranks(monkeypatch: pytest.MonkeyPatch, make: Callable[[Context], Trainer]) -> list[Any]:
    """Trainers of two simulated ranks whose collectives are real, but for the gradients."""
    ranks = SimulatedRanks(2)
    for module in (meter_module, trainer_module, finite_module, ending_module, timing_module):
        monkeypatch.setattr(module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(meter_module, "sum_over_ranks", ranks.sum)
    monkeypatch.setattr(ending_module, "any_over_ranks", ranks.any)

    def one(context: Context) -> Trainer:
        trainer = make(context)
        trainer.fit()
        return trainer

    return ranks.run(one)


@pytest.mark.parametrize(
    ("changes", "stop_at", "stopped"),
    [
        ({"log_every_n_steps": 2}, {"step": 1}, 2),
        ({"log_every_n_steps": 2}, {"step": 2}, 2),
        ({"log_every_n_steps": 100, "val_check_interval": 3}, {"step": 1}, 3),
        ({"log_every_n_steps": 100, "val_check_interval": 2}, {"validation": 2}, 2),
    ],
)
def test_ranks_stop_together_at_the_next_reduction_that_happens_anyway(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], stop_at: dict[str, int], stopped: int
) -> None:
    how = settings(**changes, max_epochs=4)

    def make(context: Context) -> Trainer:
        callbacks = {"recorder": Recorder(stop_at if context.rank == 1 else None)}
        return make_trainer(how, context=context, callbacks=callbacks, val=samples(7))

    first, second = run_ranks(monkeypatch, make)
    assert [first.progress.step, second.progress.step] == [stopped] * 2
    assert first.ending.reason == second.ending.reason == ("good enough" if "validation" in stop_at else "seen enough")


@pytest.mark.parametrize("asked_at", [(1, 1), (2, 4), (5, 3), (8, 8), (1, 11), (11, 11)])
def test_ranks_that_are_asked_at_different_times_stop_together(
    monkeypatch: pytest.MonkeyPatch, asked_at: tuple[int, int]
) -> None:
    store = HashStore()
    gradients = threading.Barrier(2, timeout=20)

    def make(context: Context) -> Trainer:
        marks = Marks()

        class InStep(Squares):
            """An optimizer step needs every rank's gradients."""

            def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
                gradients.wait()
                return super().training_step(model, batch)

        return make_trainer(
            settings(log_every_n_steps=100, max_steps=12, max_epochs=None, check_val_every_n_epoch=None),
            context=context,
            task=InStep(),
            callbacks={"ask": AskAt(marks, asked_at[context.rank])},
            watched=link(marks, lambda: Board(store)),
        )

    first, second = run_ranks(monkeypatch, make)
    assert first.progress.step == second.progress.step == min(max(asked_at) + 2, 12)
    assert first.ending.was_stopped == second.ending.was_stopped == (max(asked_at) + 2 < 12)


def test_a_bad_loss_of_one_rank_ends_all_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(context: Context) -> Trainer:
        task = BadAt(3) if context.rank == 1 else Squares()
        return make_trainer(settings(log_every_n_steps=4, max_epochs=4), context=context, task=task)

    for end in run_ranks(monkeypatch, make):
        assert isinstance(end, RunError)
        assert "since step 3 " in str(end)


def test_every_ranks_generators_are_saved_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimulatedRanks(3)
    for module in (trainer_module, finite_module):
        monkeypatch.setattr(module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(trainer_module, "generator_states", lambda _: threading.get_ident())
    states: list[Any] = ranks.run(
        lambda context: (threading.get_ident(), make_trainer(context=context).state_dict()["generators"])
    )
    assert [saved for _, saved in states] == [[thread for thread, _ in states]] * 3


# Going on


class Noisy(nn.Module):
    """Has all that a checkpoint must bring back: parameters, buffers that training moves, draws of a generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stopped_at", [1, 3, 4, 6])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, optimizer: str, accumulate: int, stopped_at: int
) -> None:
    """After 1 step, in mid-epoch, and at the end of an epoch (of 6, or of 3 steps when two batches make one)."""

    def make(folder: Path, *, max_steps: int, numbers: Numbers) -> Trainer:
        return make_trainer(
            settings(max_steps=max_steps, max_epochs=9, accumulate_grad_batches=accumulate),
            model=Noisy(),
            optimizer=OPTIMIZERS[optimizer],
            scheduler=lambda opt: StepLR(opt, step_size=4, gamma=0.7),
            interval=Interval.STEP,
            loggers={"numbers": numbers},
            val=samples(7),
            checkpoints=manager(folder),
        )

    one, parts = Numbers(), Numbers()
    whole = make(tmp_path / "a", max_steps=9, numbers=one)
    torch.manual_seed(5)
    whole.fit()
    first = make(tmp_path / "b", max_steps=stopped_at, numbers=parts)
    torch.manual_seed(5)
    first.fit()
    state = load(find(tmp_path / "b"), map_location="cpu")
    torch.manual_seed(999)  # another process, which has drawn other numbers
    second = make(tmp_path / "b", max_steps=9, numbers=parts)
    second.parts.bare_model.load_state_dict(state["model"])
    second.load_state_dict(state["training"])
    assert restore_generator_states(state["generators"][0], devices=[CPU])
    second.fit()
    assert_equal(weights(second), weights(whole))
    assert without_speed(parts) == without_speed(one)
    assert second.progress == whole.progress
    assert_same_tree(second.parts.optimizer.state_dict(), whole.parts.optimizer.state_dict())
    assert torch.equal(state_of_generator(tmp_path / "a"), state_of_generator(tmp_path / "b"))


def without_speed(numbers: Numbers) -> list[Any]:
    """All that was logged, but how fast it went, and in which phase."""
    apart = ("train/samples_per_s", "time/", "skew/")
    return [
        (step, epoch, {name: value for name, value in values.items() if not name.startswith(apart)})
        for step, epoch, values in numbers.logged
    ]


def state_of_generator(folder: Path) -> Tensor:
    tensor: Tensor = load(find(folder), map_location="cpu")["generators"][0]["cpu"]
    return tensor


def assert_same_tree(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_tree(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_tree(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_callbacks_get_their_own_state_back_and_a_new_one_none() -> None:
    old, new = Recorder(), Recorder()
    trainer = make_trainer(settings(max_steps=4), callbacks={"old": old})
    trainer.fit()
    again = make_trainer(callbacks={"new": new, "old": (old_again := Recorder())})
    again.load_state_dict(trainer.state_dict()["training"])
    assert old_again.calls == [("load_state_dict", {"steps": 4})]
    assert new.calls == []
    again.fit()
    assert new.named("on_fit_start")[0].start_step == 4


def test_a_wish_to_stop_that_was_not_agreed_yet_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 wishes to stop at step 4, which is saved; all agree with the log at 5, also having gone on from 4."""

    def make(context: Context, *, wishes: bool, folder: Path | None) -> Trainer:
        callback = Recorder({"step": 4} if wishes and context.rank == 1 else None)
        checkpoints = manager(folder / str(context.rank), every_n_steps=4) if folder else None
        how = settings(log_every_n_steps=5, max_steps=9)
        return make_trainer(how, context=context, callbacks={"recorder": callback}, checkpoints=checkpoints)

    ends = run_ranks(monkeypatch, lambda context: make(context, wishes=True, folder=tmp_path))
    assert [end.progress.step for end in ends] == [5, 5]

    def go_on(context: Context) -> Trainer:
        trainer = make(context, wishes=False, folder=None)
        state = load(tmp_path / str(context.rank) / "step_00000004", map_location="cpu")
        trainer.load_state_dict(state["training"])
        return trainer

    again = run_ranks(monkeypatch, go_on)
    assert [end.progress.step for end in again] == [5, 5]
    assert [end.ending.reason for end in again] == [end.ending.reason for end in ends]


@pytest.mark.usefixtures("own_state")
def test_generators_are_restored_after_everything_that_may_draw() -> None:
    class Draws:
        def on_fit_start(self, info: FitInfo) -> None:
            torch.rand(3)

    trainer = make_trainer(settings(max_steps=1), callbacks={"draws": Draws()})
    trainer.restore_generators = lambda: torch.manual_seed(77)
    trainer.fit()
    assert torch.initial_seed() == 77
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(77).get_state())


def test_going_on_after_the_end_saves_nothing_again(tmp_path: Path) -> None:
    trainer = make_trainer(checkpoints=manager(tmp_path))
    trainer.fit()
    (manifest,) = tmp_path.glob("step_*/manifest.json")
    before = manifest.stat().st_mtime_ns
    again = make_trainer(checkpoints=manager(tmp_path))
    again.load_state_dict(load(find(tmp_path), map_location="cpu")["training"])
    again.fit()
    assert manifest.stat().st_mtime_ns == before


# The step path holds only the step

WAITING = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__", "__repr__")


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}],
    ids=["plain", "clipping", "accumulating"],
)
def test_nothing_waits_for_the_device_between_logs(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    calls: list[tuple[str, bool]] = []
    inside: list[bool] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, bool(inside)))
            return original(tensor, *args, **kwargs)

        return call

    trainer = make_trainer(
        settings(log_every_n_steps=5, max_steps=10, max_epochs=9, **changes),
        optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=1),
        interval=Interval.STEP,
        callbacks={"recorder": Recorder()},
        loggers={"numbers": Numbers()},
    )
    log = trainer.log

    def marked(*, epoch: int) -> None:
        inside.append(True)
        log(epoch=epoch)
        inside.pop()

    monkeypatch.setattr(trainer, "log", marked)
    with monkeypatch.context() as patched:
        for name in WAITING:
            patched.setattr(Tensor, name, counting(name))
        trainer.fit()
    assert [name for name, in_log in calls if not in_log] == []
    assert calls, "logging reads tensors, so the counters must have seen it"
