"""Around the optimizer: schedules, gradients that are clipped and measured, and cheaper forms of what torch does."""

from __future__ import annotations

import copy
import functools
import io
import math
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from framework.config.schema import ClipAlgorithm, Interval
from framework.errors import ConfigError
from framework.optim import (
    Schedule,
    clip_gradients,
    cosine,
    fused_pays,
    gradient_dropper,
    gradient_norm,
    lay_out_state,
    stepper,
    with_own_kernels,
)


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    """With a gradient of 1 for its one number, which is 1 at first."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=lr)


def by_step(scheduler: Any) -> Schedule:
    return Schedule(scheduler, interval=Interval.STEP, monitor=None)


def rates(schedule: Schedule, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
    return seen


# Schedules


@settings(deadline=None)  # the first step of all loads parts of torch
@given(total=st.integers(1, 40), share=st.floats(0, 0.99), least=st.floats(0, 1))
def test_cosine_warms_up_falls_and_stays(total, share, least):
    warmup, optimizer = int(total * share), sgd(2.0)
    seen = [rate / 2.0 for rate in rates(by_step(cosine(optimizer, total, warmup, least)), optimizer, total + 3)]
    assert seen[:warmup] == pytest.approx([(s + 1) / warmup for s in range(warmup)])
    falling = [(1 + math.cos(math.pi * s / (total - warmup))) / 2 for s in range(total - warmup)]
    assert seen[warmup:total] == pytest.approx([least + (1 - least) * factor for factor in falling])
    assert seen[total:] == pytest.approx([least] * 3)


@pytest.mark.parametrize("wrong", [{"warmup_steps": 5}, {"warmup_steps": -1}, {"min_factor": 1.5}])
def test_cosine_refuses_numbers_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cosine(sgd(), 5, **wrong)


def test_a_schedule_resumes_from_its_state_read_with_weights_only():
    whole, first, second = sgd(), sgd(), sgd()
    expected = rates(by_step(cosine(whole, 9, 2)), whole, 9)
    schedule = by_step(cosine(first, 9, 2))
    begun = rates(schedule, first, 4)
    file = io.BytesIO()
    torch.save((schedule.state_dict(), first.state_dict()), file)
    file.seek(0)
    state, optimizer_state = torch.load(file, weights_only=True)
    resumed = by_step(cosine(second, 9, 2))
    resumed.load_state_dict(state)
    second.load_state_dict(optimizer_state)
    assert begun + rates(resumed, second, 5) == expected


def test_each_kind_of_schedule_moves_only_when_it_should():
    """After a step, an epoch and a validation; None never moves."""
    kinds: list[tuple[Any, Interval, str | None, list[float]]] = [
        (lambda optimizer: StepLR(optimizer, 1, gamma=0.5), Interval.STEP, None, [0.5, 0.5, 0.5]),
        (lambda optimizer: StepLR(optimizer, 1, gamma=0.5), Interval.EPOCH, None, [1.0, 0.5, 0.5]),
        (lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0), Interval.STEP, "x", [1.0, 1.0, 0.5]),
        (lambda _: None, Interval.STEP, None, [1.0, 1.0, 1.0]),
    ]
    for make, interval, monitor, expected in kinds:
        optimizer, seen = sgd(), []
        schedule = Schedule(make(optimizer), interval=interval, monitor=monitor)
        schedule.after_validation({"x": 1.0})
        optimizer.step()
        for act in (schedule.after_step, schedule.after_epoch, partial(schedule.after_validation, {"x": 1.0})):
            act()
            seen.append(optimizer.param_groups[0]["lr"])
        assert seen == expected
        schedule.load_state_dict(schedule.state_dict())


def test_a_plateau_needs_a_metric_that_is_there_and_no_other_schedule_takes_one():
    with pytest.raises(ConfigError, match=r"set scheduler\.monitor"):
        Schedule(ReduceLROnPlateau(sgd()), interval=Interval.EPOCH, monitor=None)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau only"):
        Schedule(StepLR(sgd(), 1), interval=Interval.EPOCH, monitor="val/loss")
    schedule = Schedule(ReduceLROnPlateau(sgd()), interval=Interval.EPOCH, monitor="val/loss")
    with pytest.raises(ConfigError, match="Use one of val/accuracy"):
        schedule.after_validation({"val/accuracy": 1.0})


def test_another_learning_rate_keeps_what_the_schedule_made_of_the_one_before():
    optimizer, whole = sgd(0.1), sgd(1.0)
    expected = rates(by_step(StepLR(whole, 3)), whole, 9)
    schedule = by_step(StepLR(optimizer, 3))
    rates(schedule, optimizer, 4)
    schedule.set_learning_rate(optimizer, 1.0, before=0.1)
    assert rates(schedule, optimizer, 5) == pytest.approx(expected[4:])
    plateau = sgd(0.1)  # which knows no base of its own
    plateau.param_groups[0]["lr"] /= 10  # it has moved
    schedule = Schedule(ReduceLROnPlateau(plateau), interval=Interval.EPOCH, monitor="val/loss")
    schedule.set_learning_rate(plateau, 1.0, before=0.1)
    assert plateau.param_groups[0]["lr"] == pytest.approx(0.1)
    for before in (None, 0.0):  # nothing can be scaled
        optimizer = sgd(0.0)
        schedule = by_step(cosine(optimizer, 10))
        schedule.set_learning_rate(optimizer, 1.0, before=before)
        assert rates(schedule, optimizer, 6)[::5] == pytest.approx([1.0, 0.5])


# Gradients


def with_gradients(*values: list[float] | None, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = []
    for value in values:
        parameter = nn.Parameter(torch.zeros(len(value or [0.0]), dtype=dtype))
        parameter.grad = None if value is None else torch.tensor(value, dtype=dtype)
        parameters.append(parameter)
    return parameters


def gradients(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [p.grad.tolist() for p in parameters if p.grad is not None]


def test_clipping_by_norm_scales_all_and_by_value_cuts_each():
    parameters = with_gradients([3.0, 0.0], None, [-4.0])
    assert clip_gradients(iter(parameters), value=1.0, algorithm=ClipAlgorithm.NORM) == torch.tensor(5.0)  # before
    assert gradients(parameters) == [pytest.approx([0.6, 0.0], rel=1e-5), pytest.approx([-0.8], rel=1e-5)]
    parameters = with_gradients([3.0, -0.5], [-4.0])
    assert clip_gradients(parameters, value=1.0, algorithm=ClipAlgorithm.VALUE) is None
    assert gradients(parameters) == [[1.0, -0.5], [-1.0]]
    assert math.isnan(clip_gradients(with_gradients([math.nan]), value=1.0, algorithm=ClipAlgorithm.NORM) or 0.0)


def test_the_norm_is_torchs_to_the_bit_and_has_no_graph():
    draw = torch.Generator().manual_seed(0)
    one, two = (with_gradients(*(torch.randn(n, generator=draw).tolist() for n in sizes)) for sizes in ((7,), (3, 999)))
    mixed = [*two, *with_gradients([1.0, 1.0], dtype=torch.float64)]
    graph = with_gradients([0.0] * 3)
    graph[0].grad = torch.ones(3, requires_grad=True) * 2
    for parameters in (one, two, mixed, graph):
        norm = gradient_norm(parameters)
        assert torch.equal(norm, nn.utils.get_total_norm([p.grad.detach() for p in parameters if p.grad is not None]))
        assert not norm.requires_grad
    assert gradient_norm([]).item() == 0.0


# A cheaper step and zero_grad


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_lean_step_is_the_optimizers(kind):
    lean, plain = (kind([nn.Parameter(torch.ones(3))], lr=0.1, weight_decay=0.1) for _ in range(2))
    schedules = [StepLR(each, 2, gamma=0.5) for each in (lean, plain)]
    step = stepper(lean)
    assert step != lean.step
    for number in range(5):
        for each, act, schedule in ((lean, step, schedules[0]), (plain, plain.step, schedules[1])):
            for parameter in each.param_groups[0]["params"]:
                parameter.grad = torch.full((3,), float(number))
            (each.step if number == 0 else act)()
            schedule.step()
        one, other = (optimizer.param_groups[0]["params"][0] for optimizer in (lean, plain))
        assert torch.equal(one, other)
    assert torch.is_grad_enabled()


def test_a_lean_step_calls_later_hooks_and_shows_in_the_profiler():
    optimizer = sgd()
    step, seen = stepper(optimizer), []
    step()
    for register in (
        optimizer.register_step_post_hook,
        optimizer.register_step_pre_hook,
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    ):
        handle = register(lambda *_, name=register.__name__: seen.append(name))
        step()
        handle.remove()
    step()
    assert seen == [
        *("register_step_post_hook", "register_step_pre_hook"),
        *("register_optimizer_step_post_hook", "register_optimizer_step_pre_hook"),
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in profiler.key_averages())
    assert optimizer.param_groups[0]["params"][0].item() == 1.0 - 7


@pytest.mark.parametrize("where", ["optimizer", "class"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_put_in_place_of_torchs_is_taken(monkeypatch, where, when):
    optimizer, wrapped, seen = sgd(), torch.optim.SGD.step, list[str]()

    @functools.wraps(wrapped)  # as users wrap it, with all of its marks
    def noted(*arguments: Any, **keywords: Any) -> Any:
        seen.append("noted")
        return wrapped(*arguments, **keywords)

    def put() -> None:
        if where == "class":
            monkeypatch.setattr(torch.optim.SGD, "step", noted)
        else:
            vars(optimizer)["step"] = MethodType(noted, optimizer)

    if when == "before":
        put()
    step = stepper(optimizer)
    step()
    if when == "after":
        put()
    step()
    assert len(seen) == (2 if when == "before" else 1)


class Own(torch.optim.SGD):
    """Adds to torch's step and zero_grad."""

    calls = 0

    @functools.wraps(torch.optim.SGD.step)
    def step(self, *arguments: Any, **keywords: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().step(*arguments, **keywords)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 10
        super().zero_grad(set_to_none)


def test_an_optimizers_own_step_and_zero_grad_are_called():
    sgd()  # from the first one on torch's step bears its marks
    optimizer = Own([nn.Parameter(torch.zeros(3))], lr=1.0)
    stepper(optimizer)()
    gradient_dropper(optimizer)()
    assert optimizer.calls == 11
    gradient_dropper(plain := sgd())()
    assert plain.param_groups[0]["params"][0].grad is None
    calls: list[str] = []
    plain.zero_grad = lambda **_: calls.append("mine")  # type: ignore[method-assign]
    gradient_dropper(plain)()
    assert calls == ["mine"]


def test_a_schedule_that_is_made_later_sees_that_there_was_a_step():
    optimizer = sgd()
    step = stepper(optimizer)
    schedule = StepLR(optimizer, 1)
    step()
    schedule.step()  # else torch warns, which is an error here
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


# Fused kernels and the state of another form


def test_fused_optimizers_pay_for_many_numbers_on_a_cpu():
    def zeros(size: int, **how: Any) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, **how))

    assert not fused_pays([zeros(99_999)])
    assert fused_pays([zeros(99_999), zeros(1)])
    assert fused_pays([{"params": [zeros(60_000)]}, {"params": [zeros(40_000)]}])
    assert not fused_pays([zeros(200_000, device="meta")])
    assert not fused_pays([zeros(200_000, dtype=torch.complex64)])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_state_of_another_memory_format_is_laid_out_as_the_parameters_are(kind, fused):
    keywords = {"momentum": 0.9} if kind == "SGD" else {}

    def stepped(start: torch.Tensor, state: dict[str, Any] | None) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = nn.Parameter(start)
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, fused=fused, **keywords)
        if state is not None:
            optimizer.load_state_dict(state)
            lay_out_state(optimizer)
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


def test_an_optimizer_keeps_its_own_kernels_over_a_saved_state():
    saved = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5, fused=True).state_dict()
    plain = sgd()
    plain.load_state_dict(with_own_kernels(saved, plain))
    assert [(group["lr"], group["fused"], group["foreach"]) for group in plain.param_groups] == [(0.5, None, None)]
    assert saved["param_groups"][0]["fused"] is True
