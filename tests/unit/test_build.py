from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.errors import ConfigError, TargetError, TopologyError
from framework.strategies import DDP, Single
from framework.types import Datasets
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import (
    Context,
    ParamGroups,
    RunDir,
    SchedulerConfig,
    Topology,
    build_callbacks,
    build_datasets,
    build_loggers,
    build_model,
    build_optimizer,
    build_scheduler,
    build_strategy,
    build_task,
    check_callbacks_fit,
    optimizer_configs,
)
from tests.unit import fake_targets

FAKES = "tests.unit.fake_targets"


def node(name: str, **keywords: Any) -> dict[str, Any]:
    return {"_target_": name if "." in name else f"{FAKES}.{name}", **keywords}


def make(*, span: int = 1, gpus: int = 0, device: str = "cpu") -> Context:
    topology = Topology(nnodes=1, procs_per_node=1, gpus_per_node=gpus, span=span)
    return Context(topology, 0, 0, 0, (torch.device(device),) * span, "gloo")


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def test_nested_targets_are_built_and_moved(own_state):
    built = build_model(node("Net", hidden=5, activation=node("torch.nn.ReLU")), context=make(device="meta"))
    assert isinstance(built, fake_targets.Net)
    assert isinstance(built.activation, nn.ReLU)
    assert built.weight.shape == (2, 5)
    assert built.weight.device.type == "meta"


def test_a_model_that_takes_devices_is_not_moved(own_state):
    built = build_model(node("Spread"), context=make(span=2))
    assert isinstance(built, fake_targets.Spread)
    assert built.devices == (torch.device("cpu"),) * 2


def test_several_devices_need_a_model_that_takes_them():
    with pytest.raises(TopologyError, match=r"can't use 2 devices(.|\n)*topology.gpus_per_process=1"):
        build_model(node("Net"), context=make(span=2))


def test_targets_get_plain_containers(own_state):
    given = build_model(node("Anything", sizes=[1, [2]], more={"a": [3], "b": node("echo", c=[4])}), context=make())
    assert isinstance(given, fake_targets.Anything)
    assert given.given == {"sizes": [1, [2]], "more": {"a": [3], "b": {"c": [4]}}}
    more = given.given["more"]
    for container, kind in ((given.given["sizes"], list), (more, dict), (more["a"], list), (more["b"]["c"], list)):
        assert type(container) is kind


def large() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (120_000, 7)]


@dataclass(frozen=True, kw_only=True)
class Fusing:
    """What an optimizer is built with, and the form that it gets."""

    optimizer: str = "torch.optim.SGD"
    keywords: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], list[nn.Parameter]] = large
    may_fuse: bool = True
    fused: bool | None = None
    foreach: bool | None = None


@pytest.mark.parametrize(
    "case",
    [
        Fusing(fused=True),
        Fusing(may_fuse=False, foreach=False),
        Fusing(keywords={"foreach": True}, foreach=True),
        # The optimizer has no fused form.
        Fusing(optimizer="torch.optim.RMSprop", foreach=False),
        Fusing(make=parameters, foreach=False),
    ],
)
def test_the_fused_optimizer_is_the_default(case: Fusing):
    section = node(case.optimizer, lr=0.01, **case.keywords)
    (group,) = built_optimizer(section, case.make(), may_fuse=case.may_fuse).param_groups
    assert (group.get("fused"), group["foreach"]) == (case.fused, case.foreach)


def built_optimizer(section, parameters, **options):
    model = nn.ParameterList(parameters)
    return build_optimizer(ParamGroups.of(model, optimizer_configs(section)), model, **options)


def test_an_optimizer_without_parameters_is_refused():
    for nothing in ([], [nn.Parameter(torch.ones(1), requires_grad=False)]):
        with pytest.raises(ConfigError, match="nothing to train"):
            built_optimizer(node("torch.optim.SGD"), nothing)


def test_datasets_strategy_and_task_are_built():
    for name in ("datasets", "named_datasets"):
        built = build_datasets(node(name))
        assert isinstance(built, Datasets)
        assert (built.test is None) == (name == "named_datasets")
    assert isinstance(build_strategy(node("framework.strategies.auto"), context=make()), Single)
    task = build_task(node("FakeTask", loss=node("torch.nn.MSELoss")))
    assert isinstance(task, fake_targets.FakeTask)
    assert isinstance(task.loss, nn.MSELoss)


def test_loggers_and_callbacks_keep_their_order():
    run_dir = RunDir(Path("somewhere"))
    built = build_loggers({"b": node("FakeLogger", prefix="x"), "a": node("PlainLogger")}, run_dir=run_dir)
    assert list(built) == ["b", "a"]
    assert isinstance(built["b"], fake_targets.FakeLogger)
    assert built["b"].run_dir is run_dir
    observers = build_callbacks(
        {"z": node("Observer", patience=4), "c": node("Observer")}, context=make(), run_dir=run_dir
    )
    assert {name: vars(callback)["patience"] for name, callback in observers.items()} == {"z": 4, "c": 1}


def test_own_methods_of_callbacks_and_loggers_may_have_other_names():
    callbacks(node("WithHelpers"))
    loggers(node("LoggerWithHelpers"))


def loggers(described: dict[str, Any]) -> Any:
    return build_loggers({"x": described}, run_dir=RunDir(Path()))


def callbacks(described: dict[str, Any]) -> Any:
    return build_callbacks({"x": described}, context=make(), run_dir=RunDir(Path()))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: build_model(node("echo"), context=make()),
            "model: .*echo returned .*dict. It must return a torch.nn.Module",
        ),
        (lambda: build_datasets(node("echo")), "data.datasets: .* must return framework.Datasets"),
        (lambda: build_datasets(node("datasets", parts=1, wrong=True)), "a map-style dataset, .* as its val part"),
        (lambda: build_task(node("HalfTask")), "task: HalfTask has no method training_step"),
        (
            lambda: build_strategy(node("echo"), context=make()),
            "strategy: .* an instance of framework.Strategy",
        ),
        (lambda: loggers(node("Observer")), r"logger.x: .* must return a logger, with log\(values, \*, step, epoch\)"),
        (
            lambda: loggers(node("EarlierLogger")),
            r"logger.x: .*EarlierLogger has `metrics`, .*\n\n  class EarlierLogger",
        ),
        (lambda: loggers(node("MisspeltLogger")), r"logger.x: .*flushh isn't a hook .* Did you mean flush\?"),
        (lambda: callbacks(node("PlainLogger")), "callbacks.x: .* must return a callback"),
        (
            lambda: callbacks(node("Misspelt")),
            r"callbacks.x: .*on_train_step_ends isn't a hook .* Did you mean on_train_step_end\?",
        ),
        (
            lambda: callbacks(node("MisspeltState")),
            r"callbacks.x: .*load_statedict isn't a hook .* Did you mean load_state_dict\?",
        ),
        (lambda: callbacks(node("NoHook")), "callbacks.x: .* must return a callback, with one of on_fit_start"),
    ],
)
def test_what_a_target_gives_is_checked(build, message):
    with pytest.raises(TargetError, match=message):
        build()


def test_unexpected_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError) as caught:
        build_task(node("FakeTask", loss=node("broken")))
    text = "".join(traceback.format_exception(caught.value))
    assert 'raise ZeroDivisionError("a bug") from None' in text
    assert f"While building task.loss ({FAKES}." in text
    assert "InstantiationException" not in text
    assert isinstance(caught.value.__context__, KeyError)


def scheduler(schedule: dict[str, Any] | None, **how: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"schedule": schedule, "interval": "step", "monitor": None, **how})


def test_total_steps_are_filled_in_unless_given():
    for given, expected in (({}, 4), ({"total_steps": 2}, 2)):
        optimizer = built_optimizer(node("torch.optim.SGD", lr=1.0), parameters())
        schedule = build_scheduler(scheduler(node("framework.optim.cosine", **given)), optimizer, total_steps=4)
        for _ in range(expected):
            assert optimizer.param_groups[0]["lr"] > 1e-6
            optimizer.step()
            schedule.step_after("step")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (node("framework.optim.cosine", total_steps=9), r"scheduler\.schedule\.total_steps is set too"),
        (node("torch.optim.lr_scheduler.StepLR", step_size=1), "StepLR takes no total_steps"),
    ],
)
def test_a_length_that_no_schedule_gets_is_refused(schedule, said):
    optimizer = built_optimizer(node("torch.optim.SGD", lr=1.0), parameters())
    with pytest.raises(ConfigError, match=rf"scheduler\.total_steps=3 has no effect: .*{said}"):
        build_scheduler(scheduler(schedule, total_steps=3), optimizer, total_steps=9)


def test_a_scheduler_may_take_the_runs_length():
    optimizer = built_optimizer(node("torch.optim.SGD", lr=1.0), parameters())
    settings = scheduler(node("torch.optim.lr_scheduler.StepLR", step_size=1, gamma=0.5), interval="epoch")
    schedule = build_scheduler(settings, optimizer, total_steps=None)
    optimizer.step()
    schedule.step_after("epoch")
    assert optimizer.param_groups[0]["lr"] == 0.5
    build_scheduler(scheduler(None), optimizer, total_steps=None).step_after("step")
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigError, match=r"must know when training ends(.|\n)*Set trainer\.max_steps, or"):
        build_scheduler(scheduler(node("framework.optim.cosine")), optimizer, total_steps=None)
    with pytest.raises(TargetError, match=r"scheduler\.schedule: .*LRScheduler"):
        build_scheduler(scheduler(node("torch.nn.Identity")), optimizer, total_steps=1)


def test_averages_of_buffers_that_differ_are_refused():
    """A checkpoint would have the first process's alone, and a resumed run would evaluate with that on all."""
    averaged = {"ema": node("framework.callbacks.EMAWeightAveraging")}
    weights_alone = {"ema": node("framework.callbacks.EMAWeightAveraging", use_buffers=False)}
    apart = DDP(context=cpu_context(world_size=2), broadcast_buffers=False)
    with pytest.raises(ConfigError, match=r"callbacks\.ema averages buffers .*\nUse callbacks\.ema\.use_buffers=false"):
        check_callbacks_fit(averaged, apart)
    check_callbacks_fit(weights_alone, apart)
    check_callbacks_fit(averaged, DDP(context=cpu_context(world_size=2)))
    check_callbacks_fit(averaged, DDP(context=cpu_context(), broadcast_buffers=False))
