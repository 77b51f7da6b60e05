from __future__ import annotations

import copy
import functools
import io
import math
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
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def rates(schedule: Schedule, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
    return seen


@settings(deadline=None)  # the first step of all loads parts of torch
@given(total=st.integers(1, 40), share=st.floats(0, 0.99), least=st.floats(0, 1))
def test_cosine_warms_up_falls_and_stays(total, share, least):
    warmup = int(total * share)
    optimizer = sgd(2.0)
    schedule = Schedule(cosine(optimizer, total, warmup, least), interval=Interval.STEP, monitor=None)
    seen = [rate / 2.0 for rate in rates(schedule, optimizer, total + 3)]
    assert seen[:warmup] == pytest.approx([(s + 1) / warmup for s in range(warmup)])
    assert seen[warmup] == pytest.approx(1.0)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(seen[warmup:], seen[warmup + 1 :], strict=False))
    assert seen[total:] == pytest.approx([least] * 3)


def test_cosine_is_half_way_in_the_middle():
    optimizer = sgd()
    schedule = Schedule(cosine(optimizer, 10), interval=Interval.STEP, monitor=None)
    assert rates(schedule, optimizer, 6)[5] == pytest.approx(0.5)


@pytest.mark.parametrize("wrong", [{"warmup_steps": 5}, {"warmup_steps": -1}, {"min_factor": 1.5}])
def test_cosine_refuses_numbers_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cosine(sgd(), 5, **wrong)


def test_a_schedule_goes_on_from_its_state_read_with_weights_only():
    whole, first, second = sgd(), sgd(), sgd()
    expected = rates(Schedule(cosine(whole, 9, 2), interval=Interval.STEP, monitor=None), whole, 9)
    schedule = Schedule(cosine(first, 9, 2), interval=Interval.STEP, monitor=None)
    begun = rates(schedule, first, 4)
    file = io.BytesIO()
    torch.save((schedule.state_dict(), first.state_dict()), file)
    file.seek(0)
    state, optimizer_state = torch.load(file, weights_only=True)
    resumed = Schedule(cosine(second, 9, 2), interval=Interval.STEP, monitor=None)
    resumed.load_state_dict(state)
    second.load_state_dict(optimizer_state)
    assert begun + rates(resumed, second, 5) == expected


def test_a_schedule_moves_only_when_it_should():
    for interval in Interval:
        optimizer = sgd()
        schedule = Schedule(StepLR(optimizer, 1, gamma=0.5), interval=interval, monitor=None)
        optimizer.step()
        schedule.after_validation({"val/loss": 1.0})
        schedule.after_step()
        assert optimizer.param_groups[0]["lr"] == (0.5 if interval is Interval.STEP else 1.0)
        schedule.after_epoch()
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_no_schedule_never_moves():
    schedule = Schedule(None, interval=Interval.STEP, monitor=None)
    schedule.after_step()
    schedule.after_epoch()
    schedule.after_validation({})
    assert schedule.state_dict() == {}
    schedule.load_state_dict({})


def test_plateau_watches_its_metric():
    optimizer = sgd()
    plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    schedule = Schedule(plateau, interval=Interval.EPOCH, monitor="val/loss")
    for loss in (1.0, 1.0):
        schedule.after_step()
        schedule.after_epoch()
        schedule.after_validation({"val/loss": loss})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="Use one of val/accuracy"):
        schedule.after_validation({"val/accuracy": 1.0})


def test_a_monitor_and_a_plateau_need_each_other():
    with pytest.raises(ConfigError, match=r"set scheduler\.monitor"):
        Schedule(ReduceLROnPlateau(sgd()), interval=Interval.EPOCH, monitor=None)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau only"):
        Schedule(StepLR(sgd(), 1), interval=Interval.EPOCH, monitor="val/loss")


def with_gradients(*values: list[float] | None) -> list[nn.Parameter]:
    parameters = []
    for value in values:
        parameter = nn.Parameter(torch.zeros(len(value or [0.0])))
        parameter.grad = None if value is None else torch.tensor(value)
        parameters.append(parameter)
    return parameters


def test_clipping_by_norm_scales_all_and_tells_the_norm_before():
    parameters = with_gradients([3.0, 0.0], None, [-4.0])
    assert gradient_norm(parameters) == torch.tensor(5.0)
    before = clip_gradients(iter(parameters), value=1.0, algorithm=ClipAlgorithm.NORM)
    assert before == torch.tensor(5.0)
    assert gradient_norm(parameters).item() == pytest.approx(1.0, rel=1e-5)
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-5)


def test_clipping_by_value_cuts_each_element():
    parameters = with_gradients([3.0, -0.5], [-4.0])
    assert clip_gradients(parameters, value=1.0, algorithm=ClipAlgorithm.VALUE) is None
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[1.0, -0.5], [-1.0]]


def test_a_gradient_that_is_not_finite_shows_in_the_norm_without_raising():
    assert math.isnan(clip_gradients(with_gradients([math.nan]), value=1.0, algorithm=ClipAlgorithm.NORM) or 0.0)
    assert gradient_norm([]).item() == 0.0


def test_the_norm_is_torchs_to_the_bit():
    draw = torch.Generator().manual_seed(0)
    for sizes in ((7,), (3, 1000, 1), (64,) * 20):
        parameters = [zeros(size) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        expected = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert torch.equal(gradient_norm(parameters), expected)
    parameters.append(zeros(2, dtype=torch.float64))
    parameters[-1].grad = torch.ones(2, dtype=torch.float64)
    expected = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    assert torch.equal(gradient_norm(parameters), expected)


def test_the_norm_of_gradients_that_have_a_graph_has_none():
    parameter = zeros(3)
    parameter.grad = torch.ones(3, requires_grad=True) * 2
    norm = gradient_norm([parameter])
    assert norm.item() == pytest.approx(12**0.5)
    assert not norm.requires_grad


def values_of(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [p.tolist() for group in optimizer.param_groups for p in group["params"]]


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
        assert values_of(lean) == values_of(plain)
    assert torch.is_grad_enabled()


def test_a_lean_step_calls_hooks_that_come_later_and_marks_itself_for_the_profiler():
    optimizer = sgd()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    step, seen = stepper(optimizer), []
    step()
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step()
    handle.remove()
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    step()
    handle.remove()
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("after any"))
    step()
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("before any"))
    step()
    handle.remove()
    step()
    assert seen == ["after", "before", "after any", "before any"]
    optimizer.__setstate__({"_optimizer_step_post_hooks": {1: lambda *_: seen.append("in a new place")}})
    step()
    assert seen[-1] == "in a new place"
    optimizer.__setstate__({"_optimizer_step_post_hooks": {}})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in profiler.key_averages())
    assert optimizer.param_groups[0]["params"][0].item() == 1.0 - 8


class Own(torch.optim.Optimizer):
    """Written as many are: no more of torch's habits than it needs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1


def test_an_optimizers_own_step_is_taken():
    own = Own([zeros(1)])
    stepper(own)()
    assert own.steps == 1


def noting(seen: list[str], step: Any) -> Any:
    """As a user wraps a step, with all of its marks."""

    @functools.wraps(step)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        seen.append("noted")
        return step(*arguments, **keywords)

    return noted


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["optimizer", "class"])
def test_a_step_put_in_the_place_of_torchs_is_taken(monkeypatch, where, when, scheduled):
    seen: list[str] = []
    optimizer = sgd()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)

    def put() -> None:
        if where == "class":
            monkeypatch.setattr(torch.optim.SGD, "step", noting(seen, torch.optim.SGD.step))
        else:
            vars(optimizer)["step"] = MethodType(noting(seen, torch.optim.SGD.step), optimizer)

    if when == "before":
        put()
    if scheduled and where == "optimizer":  # of a class's, a schedule keeps the step that it found
        StepLR(optimizer, 1)
    step = stepper(optimizer)
    step()
    if when == "after":
        put()
    step()
    assert len(seen) == (2 if when == "before" else 1)


class Adding(torch.optim.SGD):
    @functools.wraps(torch.optim.SGD.step)
    def step(self, *arguments: Any, **keywords: Any) -> Any:  # type: ignore[override]
        vars(self).setdefault("seen", []).append("added")
        return super().step(*arguments, **keywords)


def test_a_subclass_that_adds_to_the_step_is_asked():
    sgd()  # from the first one on torch's step bears its marks
    optimizer = Adding([zeros(1)], lr=0.1)
    stepper(optimizer)()
    assert vars(optimizer)["seen"] == ["added"]


def test_a_schedule_that_is_made_later_finds_that_there_was_a_step():
    optimizer = sgd()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    step = stepper(optimizer)
    schedule = StepLR(optimizer, 1)
    step()
    schedule.step()  # else torch warns, which is an error here
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("total", [None, 3])
def test_another_learning_rate_keeps_what_the_schedule_made_of_the_one_before(total):
    """None: a plateau, which knows no base of its own."""
    optimizer, whole = sgd(0.1), sgd(1.0)
    if total is None:
        for each in (optimizer, whole):
            each.param_groups[0]["lr"] /= 10  # it has moved
        schedule = Schedule(ReduceLROnPlateau(optimizer), interval=Interval.EPOCH, monitor="val/loss")
        schedule.set_learning_rate(optimizer, 1.0, before=0.1)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(whole.param_groups[0]["lr"])
        return
    expected = rates(Schedule(StepLR(whole, total), interval=Interval.STEP, monitor=None), whole, 9)
    schedule = Schedule(StepLR(optimizer, total), interval=Interval.STEP, monitor=None)
    rates(schedule, optimizer, 4)
    schedule.set_learning_rate(optimizer, 1.0, before=0.1)
    assert rates(schedule, optimizer, 5) == pytest.approx(expected[4:])


def test_another_learning_rate_where_nothing_can_be_scaled():
    for before in (None, 0.0):
        optimizer = sgd(0.0)
        schedule = Schedule(cosine(optimizer, 10), interval=Interval.STEP, monitor=None)
        schedule.set_learning_rate(optimizer, 1.0, before=before)
        assert optimizer.param_groups[0]["lr"] == 1.0
        assert rates(schedule, optimizer, 6)[5] == pytest.approx(0.5)


def zeros(size: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, device=device, dtype=dtype))


def test_fused_optimizers_pay_for_many_numbers_on_a_cpu():
    assert not fused_pays([zeros(99_999)])
    assert fused_pays([zeros(99_999), zeros(1)])
    assert fused_pays([{"params": [zeros(60_000)]}, {"params": [zeros(40_000)]}])
    assert not fused_pays([zeros(200_000, device="meta")])
    assert not fused_pays([zeros(200_000, dtype=torch.complex64)])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_dropping_gradients_is_zero_grad(kind):
    trained, frozen = zeros(3), zeros(3).requires_grad_(False)
    optimizer = kind([{"params": [trained]}, {"params": [frozen]}], lr=1.0)
    trained.grad = torch.ones(3)
    gradient_dropper(optimizer)()
    assert [parameter.grad for parameter in (trained, frozen)] == [None, None]


class Counting(torch.optim.SGD):
    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def test_an_optimizers_own_zero_grad_is_called():
    optimizer = Counting([zeros(3)], lr=1.0)
    gradient_dropper(optimizer)()
    assert optimizer.cleared == 1
    plain = sgd()
    calls: list[str] = []
    plain.zero_grad = lambda **_: calls.append("mine")  # type: ignore[method-assign]
    gradient_dropper(plain)()
    assert calls == ["mine"]


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
    def sgd(**options: Any) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": 0.5}], lr=0.1, **options)

    saved = sgd(fused=True).state_dict()
    plain = sgd()
    plain.load_state_dict(with_own_kernels(saved, plain))
    assert [(group["lr"], group["fused"], group["foreach"]) for group in plain.param_groups] == [(0.5, None, None)]
    assert saved["param_groups"][0]["fused"] is True
