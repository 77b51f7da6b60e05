"""Build objects from the configuration, and check what was built. No other module does.

Errors name the configuration key; exceptions that aren't ours keep their traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import device, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from framework.config.optimizers import OptimizerConfig
from framework.config.schema import Config, Node, ProgressMode, SchedulerConfig
from framework.config.targets import import_target, requires, takes, unwrap_partial, without_freeze
from framework.data.from_dataloader import unpack_dataloaders
from framework.distributed.context import Context
from framework.distributed.sharded import by_mesh
from framework.engine.observers import check_callback, check_logger
from framework.errors import ConfigError, DataError, FrameworkError, TargetError, TopologyError
from framework.optim.optimizer import fused_pays, skip_profiler_mark
from framework.optim.param_groups import ParamGroups
from framework.optim.precision import task_modules
from framework.optim.schedule import Schedule, Schedules
from framework.optim.schedule_replay import Rebuild
from framework.optim.several import Optimizers
from framework.strategies.base import Strategy
from framework.strategies.parameters import chosen
from framework.system.run_dir import RunDir
from framework.types import Callback, Collate, Datasets, Logger, LRSchedulerConfig, Task

_CPU = device("cpu")


def build_model(node: Node, *, context: Context, num_stages: int | None = None) -> nn.Module:
    """Return the model on its device. One that takes `devices` gets all of the context's and places itself.

    num_stages: set by a strategy that cuts the model into stages. The model then stays on the CPU, and `devices` is
        the CPU, repeated that many times.
    Raises TopologyError for several devices and a model that takes none.
    """
    spread = takes(node, "devices")
    if len(context.devices) > 1 and not spread:
        raise TopologyError(
            f"{node['_target_']} can't use {len(context.devices)} devices: it takes no keyword `devices`.\n"
            "Use topology.gpus_per_process=1 topology.min_gpus_per_process=1 topology.procs_per_node=auto, or a model "
            "that takes it."
        )
    node, patterns = without_freeze(node)
    home = context.device if context.device.type == "meta" else _CPU
    devices = context.devices if num_stages is None else (home,) * num_stages
    model = _build("model", node, devices=devices)
    if not isinstance(model, nn.Module):
        raise _wrong_result("model", node, model, expected="a torch.nn.Module")
    if patterns:
        for parameter in chosen(model, patterns, key="model.freeze"):
            parameter.requires_grad_(False)
    return model if spread or num_stages is not None else model.to(context.device)


def build_datasets(node: Node, **offered: Any) -> Datasets:
    """Return the Datasets, also from one dataset or a tuple of up to three (train, val, test); takes DataLoaders apart.

    offered: `run_config` and `run_context`, passed to a function that takes them. Other names are the user's.
    """
    key = "data.datasets"
    result = _build(key, node, **offered)
    if isinstance(result, tuple) and 1 <= len(result) <= 3:
        result = Datasets(*result)
    if isinstance(result, (Dataset, DataLoader)):
        result = Datasets(result)
    if not isinstance(result, Datasets):
        raise _wrong_result(key, node, result, expected="framework.Datasets(train, val, test)")
    datasets = result
    if isinstance(datasets.train, Mapping):
        raise _wrong_result(
            key, node, datasets.train, expected="one dataset to train on; mix several by MixtureSampler"
        )
    datasets = unpack_dataloaders(datasets)
    for part, dataset in datasets.parts.items():
        if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            continue
        kinds = "a map-style dataset, with __len__ and __getitem__, or a torch.utils.data.IterableDataset"
        raise _wrong_result(key, node, dataset, expected=f"{kinds} as its {part} part")
    return datasets


def build_data(run_config: Config, context: Context) -> Datasets:
    """Return the datasets, with the collate function and the sampler of the configuration, if it has some."""
    config = run_config.data
    datasets = build_datasets(config.datasets, run_config=run_config, run_context=context)
    if config.collate_fn is not None:
        datasets = replace(datasets, collate_fn=_build_collate_fn(config.collate_fn))
    if config.sampler is not None:
        if isinstance(datasets.train, IterableDataset):
            raise ConfigError("data.sampler can't go with a stream to train on, which has its own order. Leave it out.")
        sampler = _build("data.sampler", config.sampler, datasets.train)
        datasets = replace(datasets, sampler=sampler)
    if datasets.sampler is not None and not hasattr(datasets.sampler, "order"):
        own = config.sampler or config.datasets
        raise _wrong_result(
            "data.sampler", own, datasets.sampler, expected="a framework.Sampler, with __len__ and order"
        )
    return datasets


def _build_collate_fn(node: Node) -> Collate:
    """Return the function that the node names, with its keywords; or an object of the class."""
    key = "data.collate_fn"
    if not isinstance(import_target(node["_target_"]), type):
        bound: Collate = unwrap_partial(instantiate({"_convert_": "all", **node, "_partial_": True}))
        return bound
    built = _build(key, node)
    if not callable(built):
        raise _wrong_result(key, node, built, expected="an object that can be called with a list of samples")
    return built  # type: ignore[no-any-return]


def build_task(node: Node, **offered: Any) -> Task:
    """Return the task, on the CPU.

    offered: `model` (not wrapped yet), `config` and `context`, for a constructor that takes them.
    Raises ConfigError if its parameters require gradients: no optimizer gets them.
    """
    built = _build("task", node, **offered)
    names = ("validation_step",) if hasattr(built, "phases") else ("training_step", "validation_step")
    task: Task = _with_methods("task", node, built, names=names)
    for module in task_modules(task):
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if trained:
            raise ConfigError(
                f"task: {type(module).__name__} has parameters that require gradients ({', '.join(trained)}), and the "
                "optimizer trains the model's parameters only.\nMove them to the model, or freeze them with "
                "requires_grad_(False)."
            )
    return task


def build_strategy(node: Node, *, context: Context) -> Strategy:
    built = _build("strategy", node, context=context)
    if not isinstance(built, Strategy):
        raise _wrong_result("strategy", node, built, expected="an instance of framework.Strategy: inherit from it")
    return built


def build_optimizer(
    groups: ParamGroups, model: nn.Module, *, may_fuse: bool = True, total_steps: int | None = None
) -> Optimizer:
    """Return the optimizer over the parameters of `model`, or all of several by name.

    A target that takes `model` or `total_steps` (of the run) gets it.

    model: all of it, or the stages of this rank. may_fuse: False with a loss scaler, since a fused optimizer doesn't
        show that it skipped a step, and for sparse gradients.
    Raises ConfigError if there is nothing to train.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("No parameter of the model requires a gradient, so there is nothing to train.")
    built = {
        config.name: build_one_optimizer(config, own, may_fuse=may_fuse, model=model, total_steps=total_steps)
        for config, own in groups.groups(model)
    }
    return built[""] if "" in built else Optimizers(built)


def build_one_optimizer(
    config: OptimizerConfig, groups: Mapping[str, Sequence[nn.Parameter]], *, may_fuse: bool = True, **offered: Any
) -> Optimizer:
    """Return one optimizer. groups: its parameters by the labels of their groups.

    If neither `fused` nor `foreach` is chosen, it is fused if that is faster. On a CPU, `foreach=False` saves the check
    that torch's optimizers otherwise make in every step: 2 % of a toy step.
    """
    node = config.node
    key = config.key
    options = dict(zip(config.labels, ({}, *(group.options for group in config.groups)), strict=True))
    together = [parameter for own in groups.values() for parameter in own]
    given: list[Any] = together
    if config.name or config.groups:
        given = [{"params": list(own), **options[label], "name": label} for label, own in groups.items()]
    form: dict[str, bool] = {}
    if not {"fused", "foreach", "differentiable"} & node.keys():
        is_mixed = len(by_mesh(together)) > 1  # plain tensors and shards, which neither form takes together
        if is_mixed and takes(node, "foreach"):
            form["foreach"] = False
        elif not is_mixed and may_fuse and takes(node, "fused") and fused_pays(together):
            form["fused"] = True
        elif takes(node, "foreach") and {parameter.device.type for parameter in together} == {"cpu"}:
            form["foreach"] = False
    optimizer = _build(key, node, given, **form, **offered)
    if not isinstance(optimizer, Optimizer):
        raise _wrong_result(key, node, optimizer, expected="a torch.optim.Optimizer")
    skip_profiler_mark(optimizer)
    return optimizer


def build_schedule(
    settings: SchedulerConfig,
    optimizer: Optimizer,
    configs: Sequence[OptimizerConfig],
    *,
    length: Callable[[str], int | None],
) -> Schedule | Schedules:
    """Return the learning-rate schedule, or that of each of several optimizers.

    length: returns the steps of an optimizer's scheduler in the whole run, given its name; see `build_scheduler`.
    """
    if not isinstance(optimizer, Optimizers):
        return build_scheduler(settings, optimizer, length(""))
    schedules = {}
    for config in configs:
        key = "scheduler.schedule"
        own = settings
        if config.schedule is not ...:
            key = f"{config.key}.schedule"
            own = replace(settings, schedule=config.schedule)
        schedules[config.name] = build_scheduler(own, optimizer.named[config.name], length(config.name), key=key)
    return Schedules(schedules)


def build_scheduler(
    settings: SchedulerConfig, optimizer: Optimizer, total_steps: int | None, *, key: str = "scheduler.schedule"
) -> Schedule:
    """Return the learning-rate schedule of one optimizer.

    Args:
        total_steps: steps of the scheduler in the whole run, counted in `settings.interval`; None if unknown.
            `settings.total_steps` takes precedence.

    Raises:
        ConfigError: if the scheduler needs a length and none is known, takes none but one is set, or is too short.
    """
    node = settings.schedule
    if node is None:
        return Schedule(None, settings)
    is_given = "total_steps" in node
    if is_given or not takes(node, "total_steps"):
        length: int | None = node.get("total_steps")
        if settings.total_steps is not None:
            reason = f"{key}.total_steps is set too" if is_given else f"{node['_target_']} takes no total_steps"
            raise ConfigError(f"scheduler.total_steps={settings.total_steps} has no effect: {reason}. Set it to null.")
    else:
        length = total_steps if settings.total_steps is None else settings.total_steps
        if length is None and requires(node, "total_steps"):
            raise ConfigError(
                f"{node['_target_']} must know when training ends, and that isn't known: trainer.max_steps is null, "
                "and so is max_epochs, or the number of steps in an epoch of a stream is unknown.\n"
                "Set trainer.max_steps, or scheduler.total_steps."
            )
    supplied = {} if length is None else {"total_steps": length}
    rebuild = Rebuild.of(optimizer, partial(_build, key, node, **supplied))
    scheduler = rebuild.make(optimizer)
    if scheduler is None:
        return Schedule(None, settings)
    own = scheduler if isinstance(scheduler, LRSchedulerConfig) else None
    if own is not None:
        scheduler = own.scheduler
        settings = replace(settings, interval=own.interval, monitor=own.monitor)
    if not isinstance(scheduler, LRScheduler):
        raise _wrong_result(key, node, scheduler, expected="a torch.optim.lr_scheduler.LRScheduler")
    known = total_steps if own is None else None  # one with its own interval counts other steps
    if isinstance(scheduler, OneCycleLR) and known is not None and scheduler.total_steps < known:
        raise ConfigError(
            f"{node['_target_']} ends after {scheduler.total_steps} steps and can't continue, and the run has "
            f"{total_steps}.\nSet its total_steps to at least that, or train for fewer steps."
        )
    return Schedule(scheduler, settings, total_steps=length, run_steps=known, own=own, rebuild=rebuild)


def build_callbacks(nodes: Mapping[str, Node], *, context: Context, run_dir: RunDir) -> dict[str, Callback]:
    """Return the callbacks by name, in the config's order. Raises TargetError for a misspelt hook.

    Those that take `context` or `run_dir` get it.
    """
    callbacks: dict[str, Callback] = {}
    for name, node in nodes.items():
        key = f"callbacks.{name}"
        callback = _build(key, node, context=context, run_dir=run_dir)
        check_callback(callback, key=key, target=node["_target_"])
        callbacks[name] = callback
    return callbacks


def check_callbacks_fit(nodes: Mapping[str, Node], strategy: Strategy) -> None:
    """Raise ConfigError for a callback that can't go with the strategy.

    One with `evaluation_weights` needs whole models, one with `compares_replicas` equal and whole ones, and one that
    averages buffers (unless its keyword `averages_buffers_by` is false) equal buffers.
    """
    kind = type(strategy).__name__
    for name, node in nodes.items():
        target = import_target(node["_target_"])
        comparing = getattr(target, "compares_replicas", None)
        if strategy.replicas_differ and comparing is not None:
            raise ConfigError(
                f"{comparing} compares what each process has after every step with what one process has, and under "
                f"{kind} each has gradients and weights of its own between two averages.\n"
                "Compare with strategy=allreduce: everything else that depends on the number of processes is the same."
            )
        if strategy.num_stages is not None and comparing is not None:
            raise ConfigError(
                f"strategy={kind.lower()} can't go with {comparing}: it compares what whole models compute, and no "
                "process has one.\nUse strategy=ddp, which gives the same weights as a pipeline."
            )
        keyword = getattr(target, "averages_buffers_by", None)
        has_own_buffers = strategy.buffers_differ and not strategy.replicas_differ
        if has_own_buffers and keyword is not None and node.get(keyword, True):
            raise ConfigError(
                f"callbacks.{name} averages buffers (BatchNorm's statistics) too, and strategy.broadcast_buffers=false "
                "leaves each process its own: a checkpoint has the first one's average, and a resumed run would "
                f"evaluate with that on all.\nUse callbacks.{name}.{keyword}=false, with which each process evaluates "
                "with the buffers it has, or strategy.broadcast_buffers=true."
            )
        hook = getattr(target, "evaluation_weights", None)
        if strategy.forward_communicates and hook is not None and hook is not Callback.evaluation_weights:
            raise ConfigError(
                f"callbacks.{name} keeps a whole copy of the model to evaluate, and strategy={kind.lower()} leaves no "
                f"rank with a whole one.\nLeave the callback out (~callbacks.{name}), or use strategy=ddp."
            )


def build_loggers(nodes: Mapping[str, Node], *, run_dir: RunDir, progress: ProgressMode = "auto") -> dict[str, Logger]:
    """Return the loggers by name, in the config's order. Call it on rank 0 only: they open files.

    Those that take `run_dir` or `progress` get it, unless the config sets it.
    """
    loggers: dict[str, Logger] = {}
    for name, node in nodes.items():
        key = f"logger.{name}"
        logger = _build(key, node, run_dir=run_dir, progress=progress)
        check_logger(logger, key=key, target=node["_target_"])
        loggers[name] = logger
    return loggers


def _build(key: str, node: Node, *args: Any, **offered: Any) -> Any:
    """Build what is inside the node through Hydra, then call its target.

    In two steps, since Hydra would copy arguments into config containers. Targets get all containers as plain lists and
    dicts: a ListConfig in an optimizer's state would make its checkpoint unreadable.

    offered: keywords that the target gets if it takes them and the node doesn't set them.
    """
    supplied = {name: value for name, value in offered.items() if name not in node and takes(node, name)}
    place = key
    try:
        factory = instantiate({"_convert_": "all", **node, "_partial_": True})
        return factory(*args, **supplied)
    except InstantiationException as raised:
        if raised.__cause__ is None:  # Hydra's own refusal
            raise TargetError(f"{key}: {raised}") from raised
        inner = re.search(r"^full_key: (\S+)$", str(raised), flags=re.MULTILINE)
        place = f"{key}.{inner[1]}" if inner else key
        error: BaseException = raised.__cause__
    except Exception as raised:
        error = raised
    # Raised outside the handlers, so that the error keeps its context.
    if not isinstance(error, DataError):  # its message already says where data is missing or wrong
        _add_line(error, f"While building {place} ({node['_target_']}).")
    raise error


def _add_line(error: BaseException, line: str) -> None:
    if isinstance(error, FrameworkError) or not hasattr(error, "add_note"):  # notes came with Python 3.11
        error.args = (f"{error}\n{line}",)
    else:
        error.add_note(line)


def _with_methods(key: str, node: Node, built: Any, *, names: Sequence[str]) -> Any:
    missing = [name for name in names if not callable(getattr(built, name, None))]
    if missing:
        raise _wrong_result(key, node, built, expected=f"an object with {', '.join(names)}; {missing[0]} is missing")
    return built


def _wrong_result(key: str, node: Node, result: Any, *, expected: str) -> TargetError:
    kind = type(result)
    given = "None" if result is None else f"an object of type {kind.__module__}.{kind.__qualname__}"
    return TargetError(f"{key}: {node['_target_']} returned {given}. It must return {expected}.")
