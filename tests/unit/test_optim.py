"""Around the optimizer: schedules, and states that are restored."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR

from framework.errors import ConfigError
from framework.optim import cosine
from tests.helpers.internals import Schedule, SchedulerConfig, restore_optimizer, skip_profiler_mark


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    """Return SGD of one parameter of value 1, whose gradient is 1."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=lr)


def by_step(scheduler: Any) -> Schedule:
    return Schedule(scheduler, SchedulerConfig(schedule=None, interval="step", monitor=None))


def rates(schedule: Schedule, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step_after("step")
    return seen


# Schedules


@given(total=st.integers(1, 40), share=st.floats(0, 0.99), least=st.floats(0, 1))
def test_cosine_warms_up_falls_and_stays(total, share, least):
    warmup = int(total * share)
    optimizer = sgd(2.0)
    seen = [rate / 2.0 for rate in rates(by_step(cosine(optimizer, total, warmup, least)), optimizer, total + 3)]
    assert seen[:warmup] == pytest.approx([(s + 1) / warmup for s in range(warmup)])
    falling = [(1 + math.cos(math.pi * s / (total - warmup))) / 2 for s in range(total - warmup)]
    assert seen[warmup:total] == pytest.approx([least + (1 - least) * factor for factor in falling])
    assert seen[total:] == pytest.approx([least] * 3)


@pytest.mark.parametrize("wrong", [{"warmup_steps": 5}, {"warmup_steps": -1}, {"min_factor": 1.5}])
def test_cosine_refuses_numbers_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cosine(sgd(), 5, **wrong)


# The step


def test_step_hooks_see_an_unmarked_step():
    optimizer = sgd()
    skip_profiler_mark(optimizer)
    scheduler = StepLR(optimizer, step_size=2)
    optimizer.step()
    scheduler.step()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert calls == ["after", "after"]
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}
    assert optimizer.param_groups[0]["params"][0].item() == 1 - 3


def test_an_unwrapped_step_stays_unwrapped():
    def twice(self: torch.optim.SGD, closure: Any = None) -> None:
        for _ in range(2):
            torch.optim.SGD.step(self)

    Doubled: Any = type("Doubled", (torch.optim.SGD,), {"step": functools.wraps(torch.optim.SGD.step)(twice)})
    optimizer = Doubled([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    skip_profiler_mark(optimizer)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == 1 - 2


# The state of another form


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_takes_the_parameters_memory_format(fused):
    def stepped(start: torch.Tensor, state: dict[str, Any] | None) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = nn.Parameter(start)
        optimizer = torch.optim.Adam([parameter], lr=0.1, fused=fused)
        if state is not None:
            restore_optimizer(optimizer, state)
        for step in range(1, 4):
            numbers = torch.arange(start.numel(), dtype=torch.float32).view(start.shape).sin() * step
            parameter.grad = torch.empty_like(start).copy_(numbers)
            optimizer.step()
        return parameter.detach(), optimizer.state_dict()

    generator = torch.Generator().manual_seed(0)
    first, state = stepped(torch.randn(4, 3, 2, 2, generator=generator), None)
    plain, _ = stepped(first.clone(), copy.deepcopy(state))
    changed, _ = stepped(first.clone().to(memory_format=torch.channels_last), copy.deepcopy(state))
    torch.testing.assert_close(changed, plain, rtol=1e-6, atol=1e-6)
