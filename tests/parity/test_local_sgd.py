"""strategy=local_sgd against its rule in one process, with a replica for each rank: 20 steps of the toy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from framework.data.batching import share
from recipes.toy import ToyModel
from tests.helpers import results
from tests.helpers.loops import toy_batches, toy_model

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
Train = Callable[..., Path]

STEPS, LR = 20, 0.01
COMMAND = (
    *("recipe=toy", "strategy=local_sgd", "logger=none", f"trainer.max_steps={STEPS}", "trainer.num_threads=1"),
    *(f"optimizer.lr={LR}", "trainer.check_val_every_n_epoch=null", "checkpoint.monitor=null"),
)
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}


def rule(
    ranks: int,
    *,
    every: int,
    warmup: int = 0,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    nesterov: bool = False,
    clip: float | None = None,
    **inner: Any,
) -> dict[str, Tensor]:
    """The mean over `ranks` replicas after 20 steps. inner: options of each replica's own SGD."""
    replicas = [toy_model() for _ in range(ranks)]
    optimizers = [SGD(model.parameters(), lr=LR, **inner) for model in replicas]
    anchor = toy_model()
    outer = SGD(anchor.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
    for step, (inputs, targets) in enumerate(toy_batches(epochs=1, batches=STEPS), start=1):
        for rank, model in enumerate(replicas):
            own = list(share(len(inputs), rank=rank, world_size=ranks))
            model.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[own]), targets[own]) * (len(own) * ranks / len(inputs))
            loss.backward()
        if step <= warmup:
            for same in zip(*(model.parameters() for model in replicas), strict=True):
                mean = torch.stack([each.grad for each in same if each.grad is not None]).mean(dim=0)
                for each in same:
                    each.grad = mean.clone()
        for model, optimizer in zip(replicas, optimizers, strict=True):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if step == warmup:
            anchor.load_state_dict(replicas[0].state_dict())
        if step > warmup and (step - warmup) % every == 0:
            mean_weights = mean_of(replicas)
            for name, parameter in anchor.named_parameters():
                parameter.grad = parameter.detach() - mean_weights[name]
            outer.step()
            for model in replicas:
                model.load_state_dict(anchor.state_dict())
    return mean_of(replicas)


def mean_of(replicas: list[ToyModel]) -> dict[str, Tensor]:
    states = [model.state_dict() for model in replicas]
    return {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]}


def options(every: int, warmup: int, outer: Mapping[str, Any]) -> list[str]:
    given = {"every_n_steps": every, "warmup_steps": warmup, **outer}
    return [f"strategy.{name}={str(value).lower()}" for name, value in given.items()]


@pytest.mark.parametrize(
    ("processes", "every", "warmup", "outer", "momentum"),
    [
        (3, 6, 5, DILOCO, 0.9),  # shares of 7, 7 and 6; two averages, and a step after the last
        (2, 3, 0, {}, 0.9),
        pytest.param(1, 4, 3, DILOCO, 0.9, marks=pytest.mark.exhaustive),
        pytest.param(4, 7, 0, {"outer_lr": 0.5, "outer_momentum": 0.8}, 0.0, marks=pytest.mark.exhaustive),
        pytest.param(3, 25, 4, {}, 0.9, marks=pytest.mark.exhaustive),
        pytest.param(3, 5, 30, DILOCO, 0.9, marks=pytest.mark.exhaustive),
    ],
)
def test_it_ends_where_its_rule_does(
    train: Train, processes: int, every: int, warmup: int, outer: dict[str, Any], momentum: float
) -> None:
    """What is kept is the mean of the replicas, wherever they stand."""
    several = (f"topology.procs_per_node={processes}", "data.global_batch_size=20", f"optimizer.momentum={momentum}")
    run = train(*COMMAND, *options(every, warmup, outer), *several)
    wanted = rule(processes, every=every, warmup=warmup, momentum=momentum, **outer)
    results.assert_same(results.weights(run), wanted, tolerance=1e-6)
    at_each_step = rule(processes, every=1, momentum=momentum)
    apart = max((value - wanted[name]).abs().max().item() for name, value in at_each_step.items())
    assert (apart > 1e-4) == (warmup < STEPS)


def test_on_another_number_of_processes_all_begin_from_the_mean(train: Train) -> None:
    """Three, one step after an average; then two, for one step of plain SGD: that of the whole batch, from the mean."""
    some = ("strategy.every_n_steps=4", "data.global_batch_size=20", "topology.procs_per_node=3")
    run = train(*COMMAND, *some, "trainer.max_steps=5")
    model = ToyModel()
    model.load_state_dict(results.weights(run))
    train(f"resume={run}", "topology.procs_per_node=2", "trainer.max_steps=6")
    told = "the checkpoint has the different weights of 3 ranks: all resume from their mean"
    assert all(told in results.log(run, rank) for rank in range(2))
    inputs, targets = toy_batches(epochs=1, batches=6)[-1]
    nn.functional.mse_loss(model(inputs), targets).backward()
    SGD(model.parameters(), lr=LR).step()
    results.assert_same(results.weights(run), model.state_dict(), tolerance=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        ("trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2"),
        pytest.param(("trainer.gradient_clip_val=0.5", "trainer.compile=default"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_each_process_clips_its_own_gradient(train: Train, options: tuple[str, ...]) -> None:
    """Evaluated, logged and saved at odd moments besides."""
    looks = ("trainer.val_check_interval=3", "trainer.log_every_n_steps=2", "checkpoint.every_n_steps=7")
    several = ("topology.procs_per_node=3", "data.global_batch_size=20", "strategy.every_n_steps=4")
    run = train(*COMMAND, *several, *options, *looks)
    wanted = rule(3, every=4, clip=0.5)
    assert max((value - wanted[name]).abs().max().item() for name, value in rule(3, every=4).items()) > 1e-3
    results.assert_same(results.weights(run), wanted, tolerance=1e-6)
