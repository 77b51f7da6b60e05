"""A Trainer of a few parts made by hand: one rank on the CPU, no process group, 22 samples in batches of 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

from framework import Strategy
from framework.checkpoint import LocalStorage, complete_steps
from framework.types import DataShare, EvalInfo, FitInfo, StepInfo, StepOutput, Stop
from tests.helpers import loaders
from tests.helpers.contexts import CPU, cpu_context
from tests.helpers.internals import (
    CheckpointManager,
    Clock,
    Context,
    EvalLoader,
    Interval,
    MapLoader,
    MonitorLink,
    Precision,
    PrecisionPlugin,
    RankPhase,
    Schedule,
    SchedulerConfig,
    StopControl,
    Trainer,
    TrainerConfig,
    TrainState,
    parse,
    plan_batches,
)
from tests.unit.config.raw import raw_config

SIZE = 22
BATCH = 4
STEPS_PER_EPOCH = 6
"""The last batch of an epoch has 2 samples."""


class Squares:
    """Mean squared error, in training and validation."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        return StepOutput((model(inputs).squeeze(1) - targets).square().mean(), len(targets))

    validation_step = training_step


class Numbers:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, int, dict[str, float]]] = []

    def log(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        self.logged.append((step, epoch, dict(values)))

    def close(self) -> None:
        raise AssertionError("who made a logger closes it")

    def of(self, part: str) -> list[tuple[int, int]]:
        """Return the (step, epoch) of every log of `train` or `val`."""
        logs = []
        for step, epoch, values in self.logged:
            if any(name.startswith(part) for name in values):
                logs.append((step, epoch))
        return logs

    def losses(self) -> dict[int, float]:
        return {step: values["train/loss"] for step, _, values in self.logged if "train/loss" in values}


class Marks:
    """A rank status that keeps what it is given: phases by name, steps by number."""

    def __init__(self) -> None:
        self.seen: list[str | int] = []
        self.stop_signal = 0

    def set_phase(self, phase: RankPhase) -> None:
        self.seen.append(phase.label)

    def finish_step(self, step: int) -> None:
        self.seen.append(step)


def link(marks: Marks | None = None, open_store: Callable[[], Any] | None = None) -> MonitorLink:
    rank_status: Any = Marks() if marks is None else marks
    return MonitorLink(rank_status, open_store)


def samples(size: int = SIZE) -> Any:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(size, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1) + 0.1 * torch.randn(size, generator=generator))


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def settings(**changes: Any) -> TrainerConfig:
    """Two epochs, log every step, evaluate at the end of epochs; with these changes."""
    return replace(parse(raw_config()).trainer, **{"log_every_n_steps": 1, "max_epochs": 2, **changes})


def manager(folder: Path, **changes: Any) -> CheckpointManager:
    """Keeps every checkpoint; saves by nothing but the changes, and while training waits."""
    usual = replace(
        parse(raw_config()).checkpoint, monitor=None, save_top_k=-1, every_n_epochs=None, asynchronous=False
    )
    return CheckpointManager(
        replace(usual, **changes), LocalStorage(folder), config_text="recipe: small\n", is_writer=True, warn=pytest.fail
    )


def saved_steps(folder: Path) -> list[int]:
    return sorted(complete_steps(folder))


def make_trainer(
    how: TrainerConfig | None = None,
    *,
    model: nn.Module | None = None,
    task: Any = None,
    optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.05),
    scheduler: Callable[[Optimizer], Any] | None = None,
    interval: Interval = "epoch",
    monitor: str | None = None,
    callbacks: Mapping[str, Any] | None = None,
    loggers: Mapping[str, Any] | None = None,
    checkpoints: CheckpointManager | None = None,
    data: Dataset[tuple[Tensor, ...]] | None = None,
    val: Any = None,
    shuffle: bool = True,
    context: Context | None = None,
    strategy: Strategy | None = None,
    precision: Precision = "32-true",
    after_first_step: Callable[[], None] = lambda: None,
    watched: MonitorLink | None = None,
    clock: Clock | None = None,
) -> Trainer:
    how = settings() if how is None else how
    context = cpu_context() if context is None else context
    model = linear() if model is None else model
    dataset: Any = samples() if data is None else data
    strategy = Strategy() if strategy is None else strategy
    plugin = PrecisionPlugin(precision, device=CPU)
    wrapped = strategy.wrap(plugin.convert_model(model))
    opt = optimizer(model.parameters())
    share = strategy.data_share(context)
    plan = plan_batches(
        batch_size=BATCH,
        global_batch_size=BATCH * share.world_size * how.accumulate_grad_batches,
        world_size=share.world_size,
        accumulate=how.accumulate_grad_batches * share.micro_batches,
    )
    watched = link() if watched is None else watched
    state = TrainState(
        model=wrapped,
        task=Squares() if task is None else task,
        strategy=strategy,
        precision=plugin,
        optimizer=opt,
        schedule=Schedule(
            None if scheduler is None else scheduler(opt),
            SchedulerConfig(schedule=None, interval=interval, monitor=monitor),
        ),
        callbacks=callbacks or {},
        loggers=loggers or {},
        train_loader=MapLoader(dataset, split="train", plan=plan, rank=share.rank, device=CPU, seed=0, shuffle=shuffle),
        stop=StopControl(watched, context=context),
        context=context,
    )
    return Trainer(
        state,
        how,
        val_loaders={} if val is None else {"val": eval_loader(val, share, is_even=strategy.forward_communicates)},
        checkpoints=checkpoints,
        after_first_step=after_first_step,
        after_validation=lambda _: None,
        check_run_dir=lambda: None,
        link=watched,
        clock=clock,
    )


def eval_loader(dataset: Any, place: Context | DataShare, *, is_even: bool = False) -> EvalLoader:
    return loaders.eval_loader(dataset, batch_size=5, rank=place.rank, world_size=place.world_size, is_even=is_even)


def still(parameters: Any) -> SGD:
    """Nothing is learned, so what is logged can be computed from the first weights."""
    return SGD(parameters, lr=0.0)


def weights(trainer: Trainer) -> list[Tensor]:
    return [tensor.clone() for tensor in trainer.state.bare_model.state_dict().values()]


def assert_equal(given: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(given) == len(wanted)
    for one, other in zip(given, wanted, strict=True):
        assert torch.equal(one, other)


class BadAt(Squares):
    """A loss that isn't finite at a step; or one that is, with gradients that aren't."""

    def __init__(self, step: int, *, value: float = math.nan, gradient_only: bool = False) -> None:
        self.step = step
        self.value = value
        self.gradient_only = gradient_only
        self.steps = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.steps += 1
        output = super().training_step(model, batch)
        if self.steps != self.step:
            return output
        if self.gradient_only:
            # The derivative of a square root at 0 is infinite.
            return output._replace(loss=output.loss + (output.loss - output.loss.detach()).sqrt())
        return output._replace(loss=output.loss * self.value)


class Recorder:
    """Writes down every call; answers what the test wants."""

    def __init__(self, stop_at: dict[str, int] | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stop_at = stop_at or {}
        self.averaged = 0.0

    def on_fit_start(self, info: FitInfo) -> None:
        self.calls.append(("on_fit_start", info))

    def on_train_step_end(self, report: StepInfo) -> Stop | None:
        self.calls.append(("on_train_step_end", report))
        return Stop("seen enough") if self.stop_at.get("step") == report.step else None

    def on_validation_end(self, report: EvalInfo) -> Stop | None:
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


def without_speed(numbers: Numbers) -> list[Any]:
    """Return all that was logged without speeds and times."""
    varying = ("train/samples_per_s", "train/steps_per_s", "time/", "skew/", "device/")
    logs = []
    for step, epoch, values in numbers.logged:
        repeatable = {name: value for name, value in values.items() if not name.startswith(varying)}
        logs.append((step, epoch, repeatable))
    return logs
