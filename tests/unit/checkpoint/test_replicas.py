"""A checkpoint of replicas that differ, read by another number of ranks: all begin with the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from framework.checkpoint.replicas import mean_training, replicas
from framework.errors import CheckpointError
from tests.helpers.contexts import cpu_context


def own(number: int) -> dict[str, Any]:
    """The state of a rank after a step of its own."""
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


def test_floating_point_is_averaged_and_everything_else_is_the_first_ranks() -> None:
    found = mean_training(training(4))
    each = [own(number) for number in range(4)]
    assert "replicas" not in found
    assert found["schedule"] == {"last": 7}
    for name, value in found["model"].items():
        values = torch.stack([state["model"][name].double() for state in each])
        torch.testing.assert_close(value.double(), values.mean(dim=0))
        assert value.dtype == each[0]["model"][name].dtype
    entry = found["optimizer"]["state"][0]
    moments = [state["optimizer"]["state"][0]["exp_avg_sq"] for state in each]
    torch.testing.assert_close(entry["exp_avg_sq"], torch.stack(moments).mean(dim=0))
    assert found["optimizer"]["param_groups"] == each[0]["optimizer"]["param_groups"]
    assert found["callbacks"]["ema"]["num_averaged"] == 0
    assert found["callbacks"]["ema"]["average"]["weight"].tolist() == [1.5, 1.5]


def test_an_entry_that_one_rank_lacks_is_the_first_ranks() -> None:
    """A parameter that one rank has never used has no entry in its optimizer."""
    saved = training(2)
    del saved["replicas"][0]["optimizer"]["state"][0]["exp_avg"]
    saved["replicas"][0]["callbacks"] = {}
    found = mean_training(saved)
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], own(0)["optimizer"]["state"][0]["exp_avg"])
    assert found["callbacks"].keys() == {"ema"}


def test_equal_replicas_need_no_mean_and_what_cannot_be_saved_is_refused_before_it_is_sent() -> None:
    assert mean_training(own(0)).keys() == own(0).keys()
    assert replicas(own(0), cpu_context()) == []
    with pytest.raises(CheckpointError, match=r"callbacks\.mine"):
        replicas({**own(0), "callbacks": {"mine": object()}}, cpu_context())
