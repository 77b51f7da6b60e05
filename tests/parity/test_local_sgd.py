"""strategy=local_sgd and DiLoCo against their rule in one process, with a replica for each rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from framework.callbacks import EMAWeightAveraging
from recipes.toy import ToyModel
from tests.helpers import results
from tests.helpers.internals import Context, import_dynamo_late
from tests.helpers.loops import toy_batches
from tests.helpers.rank_pool import RankPool
from tests.parity import training
from tests.parity.training import STEPS, STRATEGIES, How, WeightsOfSteps, plain_loop, steps_of
from tests.unit.small_trainer import samples

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

EVERY = 6
WARMUP = 5
NORMED = How("normed", size=79)


def rule(how: How, *, ranks: int, warmup: int = 0, **outer: Any) -> dict[str, Tensor]:
    """The mean of replicas that step by themselves and take an outer step every 6 after the warm-up; the first one's
    statistics."""
    replicas = [how.model() for _ in range(ranks)]
    anchor = how.model()
    outer_optimizer = SGD(anchor.parameters(), **({"lr": 1.0} | outer))

    def average(step: int) -> None:
        if step == warmup:
            anchor.load_state_dict(replicas[0].state_dict())
        if step <= warmup or (step - warmup) % EVERY:
            return
        means = mean_of(replicas)
        for name, parameter in anchor.named_parameters():
            parameter.grad = parameter.detach() - means[name]
        outer_optimizer.step()
        training.copy_tensors(anchor.buffers(), replicas[0].buffers())
        for model in replicas:
            model.load_state_dict(anchor.state_dict())

    steps = islice(steps_of(samples(how.size), ranks=ranks, passes=how.passes), STEPS)
    forward = training.forward_of(how)
    clip = training.clip_of(how)
    plain_loop(replicas, steps, forward=forward, clip=clip, exchanging_steps=warmup, after_step=average)
    return mean_of(replicas)


def mean_of(replicas: list[nn.Module]) -> dict[str, Tensor]:
    states = [model.state_dict() for model in replicas]
    parameters = dict(replicas[0].named_parameters())
    means = dict(states[0])
    for name in parameters:
        means[name] = torch.stack([state[name] for state in states]).mean(dim=0)
    return means


@pytest.mark.parametrize(
    ("ranks", "strategy", "how"),
    [
        (3, "diloco", NORMED),
        (2, "local_sgd", How("dense")),
    ],
)
def test_it_ends_where_its_rule_does(rank_pool: RankPool, ranks: int, strategy: str, how: How) -> None:
    """Each rank clips and steps by its own gradients; what is evaluated and kept is the mean, also between averages."""
    outer: dict[str, Any] = (
        {"warmup": WARMUP, "lr": 0.7, "momentum": 0.9, "nesterov": True} if strategy == "diloco" else {}
    )
    wanted = rule(how, ranks=ranks, **outer)
    for end in rank_pool.run(training.train, strategy, how, ranks=ranks):
        results.assert_same(end.weights, wanted, tolerance=1e-9)
    exact = training.expect(how, ranks=ranks).weights
    assert ranks == 1 or max((value - exact[name]).abs().max() for name, value in wanted.items()) > 1e-4


def train_and_look(context: Context, *, looks: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Give the weights after every step, and their moving average. looks: evaluate and log after every step."""
    watch = WeightsOfSteps()
    ema = EMAWeightAveraging(decay=0.5)
    strategy = STRATEGIES["diloco"](context=context, every_n_steps=3, warmup_steps=2)
    import_dynamo_late()
    trainer = training.trainer_of(
        context, strategy, NORMED, steps=10, callbacks={"watch": watch, "ema": ema}, every=1 if looks else 100
    )
    trainer.fit()
    return watch.weights, ema.state_dict()["average"]


def test_ranks_agree_after_each_average_only(rank_pool: RankPool) -> None:
    """Two steps of warm-up, then an average every three steps. Evaluations change neither weights nor averages."""
    plain = rank_pool.run(train_and_look, looks=False, ranks=3)
    watched = rank_pool.run(train_and_look, looks=True, ranks=3)
    weights_of_ranks = [weights for weights, _ in plain]
    agreeing_steps = []
    for step, (one, *others) in enumerate(zip(*weights_of_ranks, strict=True), start=1):
        if all(torch.equal(one["0.weight"], other["0.weight"]) for other in others):
            agreeing_steps.append(step)
    assert agreeing_steps == [1, 2, 5, 8]
    for (weights, average), (again, average_again) in zip(plain, watched, strict=True):
        results.assert_same(again[-1], weights[-1])
        results.assert_same(average_again, average)


Train = Callable[..., Path]
COMMAND = (
    "recipe=toy",
    "strategy=local_sgd",
    "strategy.every_n_steps=4",
    "logger=none",
    "trainer.num_threads=1",
    "topology.procs_per_node=3",
    "data.global_batch_size=20",
    "optimizer.lr=0.01",
    "trainer.check_val_every_n_epoch=null",
    "checkpoint.monitor=null",
    "trainer.max_steps=5",
)


@pytest.mark.exhaustive
def test_another_world_size_resumes_from_the_mean(train: Train) -> None:
    """Three, one step after an average; then two, for a step of SGD on the whole batch from the mean."""
    run = train(*COMMAND)
    model = ToyModel()
    model.load_state_dict(results.weights(run))
    train(f"resume={run}", "topology.procs_per_node=2", "trainer.max_steps=6")
    assert all("different weights of 3 ranks" in results.log(run, rank) for rank in range(2))
    inputs, targets = toy_batches(epochs=1, batches=6)[-1]
    nn.functional.mse_loss(model(inputs), targets).backward()
    SGD(model.parameters(), lr=0.01).step()
    results.assert_same(results.weights(run), model.state_dict(), tolerance=1e-6)
