"""Parameters that are unfrozen and frozen during training: every strategy ends where a plain loop does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.errors import RunError
from framework.types import FitInfo, StepInfo
from tests.helpers import results
from tests.helpers.internals import Context, Trainer, import_dynamo_late
from tests.helpers.rank_pool import RankPool
from tests.parity import training
from tests.parity.training import STRATEGIES, How
from tests.unit.small_trainer import samples

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

STEPS = 9
HOW = How("dense")


def thaw(models: Iterable[nn.Module], step: int) -> None:
    """Unfreeze the first layer after the second step, and freeze the second one after the sixth."""
    for model in models:
        assert isinstance(model, nn.Sequential)
        if step == 2:
            model[0].requires_grad_(True)
        if step == 6:
            model[3].requires_grad_(False)


class Changes:
    """A callback that thaws layers, or changes a weight by what is lost in 7 digits."""

    def __init__(self, *, nudges: bool = False) -> None:
        self.nudges = nudges

    def on_fit_start(self, info: FitInfo) -> None:
        self.model = info.model

    def on_train_step_end(self, report: StepInfo) -> None:
        if not self.nudges:
            thaw([self.model], report.step)
        elif report.step == 4:
            with torch.no_grad():
                next(self.model.parameters()).mul_(1 + 1e-6)


def trained(
    context: Context, strategy: str, options: dict[str, Any], callbacks: dict[str, Any], *, freezes: bool = True
) -> Trainer:
    made = STRATEGIES[strategy](context=context, **options)
    model = HOW.model(seed=made.data_share(context).rank)
    model.get_submodule("0").requires_grad_(not freezes)
    import_dynamo_late()
    trainer = training.trainer_of(context, made, HOW, steps=STEPS, model=model, callbacks=callbacks)
    trainer.fit()
    return trainer


def weights_after_thawing(context: Context, strategy: str, options: dict[str, Any]) -> dict[str, Tensor]:
    trainer = trained(context, strategy, options, {"changes": Changes()})
    return training.weights_of(trainer.state.bare_model)


@lru_cache
def plain(ranks: int) -> dict[str, Tensor]:
    replicas = [HOW.model() for _ in range(ranks)]
    for model in replicas:
        model.get_submodule("0").requires_grad_(False)
    steps = islice(training.steps_of(samples(HOW.size), ranks=ranks, passes=HOW.passes), STEPS)
    forward = training.forward_of(HOW)
    clip = training.clip_of(HOW)
    training.plain_loop(replicas, steps, forward=forward, clip=clip, after_step=lambda step: thaw(replicas, step))
    return training.weights_of(replicas[0])


@dataclass(frozen=True, kw_only=True)
class Thawing:
    """How a model is trained, as how many copies."""

    ranks: int = 3
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    copies: int = 3


@pytest.mark.parametrize(
    "case",
    [
        Thawing(ranks=2, strategy="1f1b", copies=1),
        Thawing(strategy="allreduce"),
        Thawing(strategy="ddp"),
        Thawing(strategy="fsdp"),
        Thawing(strategy="local_sgd", options={"warmup_steps": 100}),
        pytest.param(Thawing(ranks=4, strategy="1f1b copies", copies=2), marks=pytest.mark.exhaustive),
        pytest.param(Thawing(ranks=2, strategy="ddp static", copies=2), marks=pytest.mark.exhaustive),
    ],
    ids=lambda case: case.strategy,
)
def test_training_ends_where_a_plain_loop_does(rank_pool: RankPool, case: Thawing) -> None:
    """Gradients are clipped by the norm of what is trained; momentum and weight decay don't move what is frozen."""
    for found in rank_pool.run(weights_after_thawing, case.strategy, case.options, ranks=case.ranks):
        results.assert_same(found, {name: plain(case.copies)[name] for name in found}, tolerance=1e-9)


def thaw_on_one(context: Context) -> str:
    with pytest.raises(RunError) as raised:
        trained(context, "ddp", {}, {"changes": Changes()} if context.rank == 1 else {})
    return str(raised.value)


def test_ranks_with_different_trainable_parameters_are_refused(rank_pool: RankPool) -> None:
    for message in rank_pool.run(thaw_on_one, ranks=2):
        assert "rank 0: nothing\n  rank 1: unfrozen: 0.weight, 0.bias" in message
        assert "Set requires_grad on every rank, after the same step" in message


def drift_apart(context: Context, strategy: str) -> str:
    """Return what a checkpoint says of replicas of which one has drifted."""
    nudges = {"changes": Changes(nudges=True)} if context.rank == 1 else {}
    trainer = trained(context, strategy, {}, nudges, freezes=False)
    with pytest.raises(RunError) as raised:
        trainer.state.state_dict()
    return str(raised.value)


@pytest.mark.parametrize(
    ("ranks", "strategy", "apart"),
    [
        (3, "allreduce", "0, 2 | 1"),
        pytest.param(4, "hsdp", "1 | 3", marks=pytest.mark.exhaustive),
        pytest.param(4, "1f1b copies", "0 | 1", marks=pytest.mark.exhaustive),
    ],
)
def test_drifting_replicas_are_noticed_when_saving(rank_pool: RankPool, ranks: int, strategy: str, apart: str) -> None:
    for message in rank_pool.run(drift_apart, strategy, ranks=ranks):
        assert f"after step {STEPS} the ranks have different values of 0.weight (ranks {apart})" in message
