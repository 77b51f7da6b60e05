"""The part of a checkpoint that each rank has of its own: found again by its rank, or the mean of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from framework.checkpoint.replicas import mean_training, own_training, replicas, replicas_saved
from framework.errors import CheckpointError
from tests.unit.simulated_ranks import cpu_context


def own(number: int) -> dict[str, Any]:
    """Of a rank after a step of its own."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    optimizer = Adam(model.parameters())
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    callbacks = {"ema": {"num_averaged": number, "average": {"weight": torch.full((2,), float(number))}}}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "callbacks": callbacks}


def training(ranks: int) -> dict[str, Any]:
    first, *others = (own(number) for number in range(ranks))
    return {**first, "schedule": {"last": 7}, "replicas": others}


def test_each_rank_finds_its_own() -> None:
    saved = training(3)
    assert replicas_saved(saved) == 3
    for rank in range(3):
        found = own_training(saved, cpu_context(rank, world_size=3))
        assert str(found) == str({**own(rank), "schedule": {"last": 7}})


def test_another_number_of_ranks_finds_the_mean() -> None:
    found = mean_training(training(4))
    assert "replicas" not in found
    assert found["schedule"] == {"last": 7}
    each = [own(number) for number in range(4)]
    for name, value in found["model"].items():
        values = [state["model"][name] for state in each]
        if name.endswith("num_batches_tracked"):
            assert torch.equal(value, torch.tensor(1))
        else:
            torch.testing.assert_close(value, torch.stack(values).mean(dim=0))
    entry = found["optimizer"]["state"][0]
    assert entry["step"].item() == 1.0
    moments = [state["optimizer"]["state"][0]["exp_avg_sq"] for state in each]
    torch.testing.assert_close(entry["exp_avg_sq"], torch.stack(moments).mean(dim=0))
    assert found["optimizer"]["param_groups"] == each[0]["optimizer"]["param_groups"]
    # Of the first, but for tensors of floating point.
    assert found["callbacks"]["ema"]["num_averaged"] == 0
    assert found["callbacks"]["ema"]["average"]["weight"].tolist() == [1.5, 1.5]
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    model.load_state_dict(found["model"])
    Adam(model.parameters()).load_state_dict(found["optimizer"])


def test_what_one_lacks_is_the_firsts() -> None:
    """A parameter that one rank has never used has no entry in its optimizer."""
    saved = training(2)
    del saved["replicas"][0]["optimizer"]["state"][0]["exp_avg"]
    saved["replicas"][0]["callbacks"] = {}
    found = mean_training(saved)
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], own(0)["optimizer"]["state"][0]["exp_avg"])
    assert found["callbacks"].keys() == {"ema"}


def test_where_all_had_the_same_there_is_nothing_to_do() -> None:
    saved = own(0)
    assert replicas_saved(saved) == 1
    assert mean_training(saved) == saved
    assert replicas(saved, cpu_context()) == []


def test_what_a_checkpoint_cannot_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\.mine"):
        replicas({**own(0), "callbacks": {"mine": object()}}, cpu_context())
