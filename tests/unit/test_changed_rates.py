"""A learning rate that changes on resume, under each of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from framework.errors import ConfigError
from framework.optim import cosine
from tests.helpers.internals import Change, Rebuild, Schedule, SchedulerConfig

Make = Callable[[Optimizer], Any]
OLD = 0.1
NEW = 0.03
OTHER = 0.02
STEPS = 24
SETTINGS = SchedulerConfig(schedule=None, total_steps=None, interval="step", monitor="loss")


def sequential(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.LambdaLR(optimizer, lambda s: 0.97**s)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


def three_parts(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4, 13])


def chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6), lr_scheduler.StepLR(optimizer, 4, gamma=0.7)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def chained_in_sequence(optimizer: Optimizer) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ExponentialLR(optimizer, 0.95), lr_scheduler.PolynomialLR(optimizer, 30)], [7]
    )


def sequence_in_chain(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([sequential(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.99)])


FOLLOWING: dict[str, Make] = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda _: 0.95),
    "StepLR": partial(lr_scheduler.StepLR, step_size=5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[3, 9]),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=10),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=10),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10, eta_min=0.001),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=30, power=2),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5, T_mult=2),
    "cosine": partial(cosine, total_steps=30, warmup_steps=4),
    "SWALR": partial(SWALR, swa_lr=0.001, anneal_epochs=30),
    "SequentialLR": sequential,
    "SequentialLR of three": three_parts,
    "SequentialLR, polynomial": chained_in_sequence,
    "ChainedScheduler": chained,
    "ChainedScheduler of SequentialLR": sequence_in_chain,
}


def optimizer_of(first: float, kind: type[Any] = SGD, **more: Any) -> Any:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": first}, {"params": [nn.Parameter(torch.ones(1))]}]
    return kind(groups, lr=OTHER, **more)


def scheduled(optimizer: Any, make: Make, settings: SchedulerConfig = SETTINGS) -> Schedule:
    rebuild = Rebuild.of(optimizer, make)
    return Schedule(rebuild.make(optimizer), settings, rebuild=rebuild)


def run(optimizer: Any, schedule: Schedule, steps: int, *, metric: float | None = None) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.zeros(1)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step_after(*(("step",) if metric is None else ("validation", {"loss": metric})))
    return rates


def resumed(make: Make, old: Any, old_schedule: Schedule, changes: Any, **more: Any) -> tuple[Any, Schedule]:
    optimizer = optimizer_of(NEW, type(old), **more)
    schedule = scheduled(optimizer, make)
    optimizer.load_state_dict(old.state_dict())
    schedule.load_state_dict(old_schedule.state_dict())
    schedule.change_settings(optimizer, changes, key="optimizer")
    return optimizer, schedule


CHANGED = {0: {"lr": Change(OLD, NEW)}}


@pytest.mark.parametrize("at", [1, 4, 5, 8, 13, 17])
@pytest.mark.parametrize("name", FOLLOWING)
def test_later_rates_follow_the_new_rate(name: str, at: int) -> None:
    make = FOLLOWING[name]
    old = optimizer_of(OLD)
    old_schedule = scheduled(old, make)
    run(old, old_schedule, at)
    optimizer, schedule = resumed(make, old, old_schedule, CHANGED)
    # A resume that changes nothing, which must not lose the change.
    again = optimizer_of(NEW)
    again_schedule = scheduled(again, make)
    again.load_state_dict(optimizer.state_dict())
    again_schedule.load_state_dict(schedule.state_dict())
    whole = optimizer_of(NEW)
    expected = run(whole, scheduled(whole, make), STEPS)[at:]
    assert run(optimizer, schedule, STEPS - at) == expected
    assert run(again, again_schedule, STEPS - at) == expected


@pytest.mark.parametrize("at", [1, 6, 15])
@pytest.mark.parametrize(
    "make",
    [
        partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=30),
        partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=4),
        partial(SWALR, swa_lr=0.001, anneal_epochs=0),
    ],
    ids=["OneCycleLR", "CyclicLR", "SWALR"],
)
def test_a_rate_that_the_schedule_sets_is_refused(make: Make, at: int) -> None:
    old = optimizer_of(OLD, momentum=0.9)
    old_schedule = scheduled(old, make)
    run(old, old_schedule, at)
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.03 has no effect.*sets it from its own"):
        resumed(make, old, old_schedule, CHANGED, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "name", "before", "now"), [(SGD, "momentum", 0.9, 0.5), (Adam, "betas", (0.9, 0.99), (0.8, 0.99))]
)
def test_a_momentum_that_the_schedule_sets_is_refused(kind: type[Any], name: str, before: Any, now: Any) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=30)
    old = optimizer_of(NEW, kind, **{name: before})
    old_schedule = scheduled(old, make)
    run(old, old_schedule, 6)
    with pytest.raises(ConfigError, match=f"optimizer.{name}=.* has no effect: OneCycleLR"):
        resumed(make, old, old_schedule, {0: {name: Change(before, now)}}, **{name: now})
    changes = {1: {"weight_decay": Change(0, 0.5)}}
    optimizer, _ = resumed(make, old, old_schedule, changes, **{name: before, "weight_decay": 0.5})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.5]


PLATEAU = partial(lr_scheduler.ReduceLROnPlateau, patience=1, factor=0.3, min_lr=0.001)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_plateau_reductions_follow_the_new_rate(at: int) -> None:
    old = optimizer_of(OLD)
    old_schedule = scheduled(old, PLATEAU)
    run(old, old_schedule, at, metric=1.0)
    optimizer, schedule = resumed(PLATEAU, old, old_schedule, CHANGED)
    whole = optimizer_of(NEW)
    expected = run(whole, scheduled(whole, PLATEAU), STEPS, metric=1.0)[at:]
    assert run(optimizer, schedule, STEPS - at, metric=1.0) == expected


def test_unknown_rates_are_refused() -> None:
    old = optimizer_of(OLD)
    old_schedule = scheduled(old, PLATEAU)
    run(old, old_schedule, 22, metric=1.0)
    with pytest.raises(ConfigError, match="has reached its min_lr"):
        resumed(PLATEAU, old, old_schedule, CHANGED)
    for make in (FOLLOWING["StepLR"], PLATEAU):
        old = optimizer_of(OLD)
        old_schedule = scheduled(old, make)
        # A callback may change a rate.
        old.param_groups[0]["lr"] *= 0.5
        with pytest.raises(ConfigError, match="Something else sets it, such as a callback"):
            resumed(make, old, old_schedule, CHANGED)


def test_without_a_schedule_the_new_rate_holds() -> None:
    for present, expected in ((OLD, NEW), (OLD / 2, NEW / 2)):
        optimizer = optimizer_of(present)
        Schedule(None, SETTINGS).change_settings(optimizer, CHANGED, key="optimizer")
        assert [group["lr"] for group in optimizer.param_groups] == [expected, OTHER]
