"""strategy=local_sgd: what it refuses, what it does alone, and what three ranks have between averages and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from framework.errors import CheckpointError, ConfigError
from framework.launch.warm import WarmServer
from framework.strategies import LocalSGD
from tests.helpers.ranks import left_by_ranks
from tests.unit.simulated_ranks import cpu_context

DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0 must be 1 or more"),
        ({"every_n_steps": -3}, r"every_n_steps=-3 must be 1 or more"),
        ({"warmup_steps": -1}, r"warmup_steps=-1 must be 0, for no warm-up"),
        ({"outer_lr": 0.0}, r"outer_lr=0\.0 must be above 0"),
        ({"outer_lr": float("nan")}, r"outer_lr=nan must be above 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1\.0 must be 0"),
        ({"outer_momentum": -0.1}, r"outer_momentum=-0\.1 must be 0"),
        ({"nesterov": True}, r"nesterov=true needs a momentum"),
        ({"bucket_cap_mb": -1}, r"bucket_cap_mb=-1 must be 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy\.{message}"):
        LocalSGD(context=cpu_context(), **options)


def test_where_nothing_is_trained_there_is_nothing_to_average() -> None:
    with pytest.raises(ConfigError, match="strategy=local_sgd averages weights, but no parameter of Linear"):
        LocalSGD(context=cpu_context()).wrap(nn.Linear(1, 1).requires_grad_(False))


def test_alone_it_is_one_process() -> None:
    """Nothing is kept or exchanged, and no group is needed."""
    strategy, model = LocalSGD(context=cpu_context(), every_n_steps=1, warmup_steps=1), nn.BatchNorm1d(2)
    assert not strategy.replicas_differ
    assert strategy.unwrap(strategy.wrap(model)) is model
    for _ in range(3):
        with strategy.accumulate(model, synchronise=True):
            model(torch.randn(4, 2)).square().sum().backward()
        strategy.after_update(model)
    assert strategy.state_dict(model) == {"steps": 3, "anchor": {}, "momentum": {}}
    with strategy.evaluation_weights(model):
        strategy.before_evaluation(model)
    assert strategy.weight_copies == 0


def test_the_outer_optimizer_is_torchs() -> None:
    """Of one rank: the gradient is what the weights were minus what they have become."""
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    outer = SGD(twin.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    strategy = LocalSGD(context=cpu_context(), every_n_steps=2, **DILOCO)
    strategy.wrap(model)
    for step in range(1, 7):
        with strategy.accumulate(model, synchronise=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        if step % 2 == 0:
            for mine, own in zip(twin.parameters(), model.parameters(), strict=True):
                mine.grad = mine.detach() - own.detach()
            outer.step()
        strategy.after_update(model)
        if step % 2 == 0:
            for mine, own in zip(twin.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(own, mine)
    state = strategy.state_dict(model)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(-state["momentum"][name], outer.state[parameter]["momentum_buffer"])


def test_it_goes_on_with_what_it_kept_and_not_with_that_of_others() -> None:
    torch.manual_seed(0)
    strategy, model = LocalSGD(context=cpu_context(), every_n_steps=2, **DILOCO), nn.Linear(2, 1)
    strategy.wrap(model)

    def step(strategy: LocalSGD, model: nn.Module) -> None:
        with strategy.accumulate(model, synchronise=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        strategy.after_update(model)

    for _ in range(5):  # one after the second average
        step(strategy, model)
    saved = {kind: each if kind == "steps" else dict(each) for kind, each in strategy.state_dict(model).items()}
    saved |= {kind: {name: each.clone() for name, each in saved[kind].items()} for kind in ("anchor", "momentum")}
    # As a checkpoint is read: in another bucket size, and by a model that has the weights already.
    other, copy = LocalSGD(context=cpu_context(), every_n_steps=2, bucket_cap_mb=0, **DILOCO), nn.Linear(2, 1)
    other.wrap(copy)
    copy.load_state_dict(model.state_dict())
    other.load_state_dict(copy, saved)
    for _ in range(4):
        step(strategy, model)
        step(other, copy)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), copy.parameters(), strict=True))
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad_(False)
    third = LocalSGD(context=cpu_context(), **DILOCO)
    third.wrap(frozen)
    with pytest.raises(CheckpointError, match="strategy=local_sgd is of other weights: bias are only in one"):
        third.load_state_dict(frozen, saved)
    third.load_state_dict(frozen, {})  # of a run with another strategy
    assert third.state_dict(frozen)["steps"] == 0


@pytest.mark.parametrize(("world_size", "kept"), [(3, {"buffers_of": 2}), (2, {})])
def test_whose_buffers_all_are_to_get_is_kept_for_as_many_ranks(world_size: int, kept: dict[str, int]) -> None:
    strategy, other = (LocalSGD(context=cpu_context(world_size=size)) for size in (3, world_size))
    assert strategy.take_buffers(nn.BatchNorm1d(2), source=2)
    other.load_state_dict(nn.BatchNorm1d(2), strategy.state_dict(nn.BatchNorm1d(2)))
    assert other.state_dict(nn.BatchNorm1d(2)) == {"steps": 0, "anchor": {}, "momentum": {}, **kept}


def test_how_far_the_next_exchange_is() -> None:
    strategy, model = LocalSGD(context=cpu_context(), every_n_steps=3, warmup_steps=2), nn.Linear(1, 1)
    strategy.wrap(model)
    found, of_warmup, kept = [], strategy._all_reduce, []
    for _ in range(9):
        found.append(strategy.steps_to_exchange)
        kept.append(strategy._all_reduce is of_warmup)
        strategy.after_update(model)
    assert found == [1, 1, 3, 2, 1, 3, 2, 1, 3]
    assert kept == [True] * 2 + [False] * 7  # with its memory for gradients


@pytest.mark.multiproc
def test_three_ranks_between_averages_and_after(warm: WarmServer, tmp_path: Path) -> None:
    entry = "tests.multiproc.local_sgd_entries:replicas_apart"
    for left in left_by_ranks(entry, procs=3, warm=warm, folder=tmp_path):
        assert left["meets"] == [1, 2, 5, 8]
        told = left["refused"]
        assert "strategy=local_sgd averages dense gradients, and there is a sparse one: weight" in told
