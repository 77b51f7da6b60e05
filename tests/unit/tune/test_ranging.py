"""The range test: rates, ratios of groups, the global loss, and where it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from framework.config.parse import parse
from framework.data.batching import BatchPlan
from framework.data.loader import TrainLoader
from framework.tune.ranging import range_test
from tests.unit.config.raw import raw_config
from tests.unit.simulated_ranks import SimulatedRanks
from tests.unit.small_trainer import make_trainer, samples


def tune(**changes: Any) -> Any:
    return replace(parse(raw_config()).tune, **{"min_lr": 1e-4, "max_lr": 10.0, "num_training": 11, **changes})


def test_rates_grow_evenly_and_groups_keep_their_ratio() -> None:
    model, seen = nn.Linear(3, 1), []

    def groups(parameters: Any) -> SGD:
        return SGD([{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.05}], lr=1.0)

    trainer = make_trainer(model=model, optimizer=groups)
    trainer.parts.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append([group["lr"] for group in optimizer.param_groups])
    )
    noted: list[int] = []
    curve = range_test(trainer, tune(early_stop_threshold=None), note=noted.append)
    assert [point.lr for point in curve.points] == pytest.approx([1e-4 * 10 ** (n / 2) for n in range(11)])
    assert [first for first, _ in seen] == pytest.approx([point.lr for point in curve.points])
    assert [second / first for first, second in seen] == pytest.approx([0.25] * 11)
    assert noted == list(range(1, 12))


def test_rates_however_far_apart_are_finite() -> None:
    curve = range_test(make_trainer(), tune(min_lr=1e-320, max_lr=1e30), note=lambda _: None)
    powers = [math.log10(point.lr) for point in curve.points[:4]]
    assert powers == pytest.approx([-320, -285, -250, -215], abs=1e-3)


def test_it_goes_on_over_the_ends_of_epochs_and_ends_where_the_loss_is_no_number() -> None:
    curve = range_test(
        make_trainer(), tune(num_training=60, max_lr=1e12, early_stop_threshold=None), note=lambda _: None
    )
    assert 6 < len(curve.points) < 60
    assert not math.isfinite(curve.points[-1].loss)
    assert curve.stopped is not None


def test_it_ends_where_it_diverges() -> None:
    curve = range_test(make_trainer(), tune(num_training=60, max_lr=1e6), note=lambda _: None)
    assert len(curve.points) < 60
    assert str(curve.stopped).startswith("the loss had risen to ")


def test_the_loss_is_that_of_the_global_batch_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose replicas are trained apart here; the first loss is of the same weights as with one rank."""
    ranks = SimulatedRanks(2)
    monkeypatch.setattr("framework.meter.gather_to_all", ranks.gather)
    monkeypatch.setattr("framework.meter.sum_over_ranks", ranks.sum)

    def run(context: Any) -> list[float]:
        model = linear_alike()
        trainer = make_trainer(model=model, context=context, data=samples(40), optimizer=lambda p: SGD(p, lr=0.1))
        return [point.loss for point in range_test(trainer, tune(), note=lambda _: None).points]

    first, second = ranks.run(run)
    assert first == second
    assert isinstance(first, list)
    model = linear_alike()
    trainer = make_trainer(model=model, data=samples(40))
    assert isinstance(trainer.train_loader, TrainLoader)
    window = next(trainer.train_loader.replanned(BatchPlan(8, 1, 1)).epoch(0))
    (micro,) = window.micro_batches
    inputs, targets = micro.batch
    with torch.no_grad():
        expected = (model(inputs).squeeze(1) - targets).square().mean().item()
    assert first[0] == pytest.approx(expected, rel=1e-6)


def linear_alike() -> nn.Module:
    """As `linear`, without seeding what threads share."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
        model.bias.zero_()
    return model
