"""From config to objects: the only place that instantiates. Each function checks what came out.

Errors get the config key added to their message; exceptions that aren't ours keep their traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import Tensor, device, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import IterableDataset

from framework.config.schema import Node, Precision, SchedulerConfig
from framework.config.suggest import did_you_mean, nearest
from framework.distributed.context import Context
from framework.errors import ConfigError, DataError, FrameworkError, TargetError, TopologyError
from framework.optim import Schedule, are_on_cpu, fused_pays
from framework.precision import task_modules
from framework.run_dir import RunDir
from framework.targets import check_targets, import_target, is_torchs, requires, takes
from framework.types import (
    Callback,
    Datasets,
    Logger,
    Strategy,
    Task,
    buffers_differ,
    forward_communicates,
    replicas_differ,
)

__all__ = [
    "build_callbacks",
    "build_datasets",
    "build_loggers",
    "build_model",
    "build_optimizer",
    "build_scheduler",
    "build_strategy",
    "build_task",
    "check_callbacks_fit",
    "check_precision_fits",
    "check_targets",
]

_CPU = device("cpu")
_HOOKS = (
    "on_fit_start",
    "on_train_step_end",
    "on_validation_end",
    "on_fit_end",
    "evaluation_weights",
)


def build_model(node: Node, *, context: Context, num_stages: int | None = None) -> nn.Module:
    """The model on its device. One that takes `devices` gets all of the context's and places itself.

    num_stages: of a strategy that cuts the model: it stays where it is made, on the CPU, and one that takes `devices`
    gets that many times the CPU. Raises TopologyError for several devices and a model that takes none.
    """
    spread = takes(node, "devices")
    if len(context.devices) > 1 and not spread:
        raise TopologyError(_too_many_devices(node, context=context))
    home = context.device if context.device.type == "meta" else _CPU
    devices = context.devices if num_stages is None else (home,) * num_stages
    model = _build("model", node, **({"devices": devices} if spread else {}))
    if not isinstance(model, nn.Module):
        raise _wrong_result("model", node, model, expected="a torch.nn.Module")
    return model if spread or num_stages is not None else model.to(context.device)


def build_datasets(node: Node) -> Datasets:
    """The datasets; a plain tuple (train, val, test) or shorter is taken too."""
    key = "data.datasets"
    result = _build(key, node)
    if not isinstance(result, tuple) or not 1 <= len(result) <= 3:
        raise _wrong_result(key, node, result, expected="framework.Datasets(train, val, test)")
    datasets = Datasets(*result)
    for part, dataset in zip(Datasets._fields, datasets, strict=True):
        if isinstance(dataset, IterableDataset) or (dataset is None and part != "train"):
            continue
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            expected = (
                f"a map-style dataset, with __len__ and __getitem__, or a torch.utils.data.IterableDataset as its "
                f"{part} part"
            )
            raise _wrong_result(key, node, dataset, expected=expected)
    return datasets


def build_task(node: Node) -> Task:
    """Return the task, on the CPU. Raises ConfigError if its parameters require gradients: no optimizer gets them."""
    task: Task = _with_methods("task", node, _build("task", node), names=("training_step", "validation_step"))
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
    supplied = {"context": context} if takes(node, "context") else {}
    built = _build("strategy", node, **supplied)
    strategy: Strategy = _with_methods(
        "strategy", node, built, names=("wrap", "unwrap", "accumulate", "before_evaluation")
    )
    return strategy


def build_optimizer(node: Node, parameters: Iterable[Tensor | dict[str, Any]], *, may_fuse: bool = True) -> Optimizer:
    """The optimizer over `parameters`, or groups of them. Raises ConfigError where there is nothing to train.

    Where it has a fused form, and neither that nor `foreach` was chosen, it is taken where it pays. Where it doesn't,
    an optimizer of torch's is told on a CPU what it would find out in every step: that `foreach` doesn't pay either.
    may_fuse: false where a loss scaler has to see whether a step was left out, which a fused one does unseen, and where
    gradients may be sparse.
    """
    given = list(parameters)
    if not any(isinstance(item, dict) or item.requires_grad for item in given):
        raise ConfigError("No parameter of the model requires a gradient, so there is nothing to train.")
    chosen = {"fused", "foreach", "differentiable"} & node.keys()
    forms: dict[str, bool] = {}
    if may_fuse and not chosen and takes(node, "fused") and fused_pays(given):
        forms["fused"] = True
    elif not chosen and takes(node, "foreach") and is_torchs(node) and are_on_cpu(given):
        forms["foreach"] = False  # which torch's own come to on a CPU, after a look at every parameter in every step
    optimizer = _build("optimizer", node, given, **forms)
    if not isinstance(optimizer, Optimizer):
        raise _wrong_result("optimizer", node, optimizer, expected="a torch.optim.Optimizer")
    return optimizer


def build_scheduler(settings: SchedulerConfig, optimizer: Optimizer, total_steps: int | None) -> Schedule:
    """The schedule of the learning rate.

    Args:
        total_steps: steps of the scheduler in the whole run, counted in `settings.interval`; None if unknown.
            `settings.total_steps` takes precedence.

    Raises:
        ConfigError: if the scheduler needs a length and none is known, takes none but one is set, or is too short.
    """
    key, node = "scheduler.schedule", settings.schedule
    if node is None:
        return Schedule(None, interval=settings.interval, monitor=settings.monitor)
    takes_length = takes(node, "total_steps") and "total_steps" not in node
    length: int | None = node.get("total_steps")
    supplied = {}
    if settings.total_steps is not None and not takes_length:
        is_given = "total_steps" in node
        reason = f"{key}.total_steps is set too" if is_given else f"{node['_target_']} takes no total_steps"
        raise ConfigError(f"scheduler.total_steps={settings.total_steps} has no effect: {reason}. Set it to null.")
    if takes_length:
        length = total_steps if settings.total_steps is None else settings.total_steps
        if length is not None:
            supplied["total_steps"] = length
        elif requires(node, "total_steps"):
            raise ConfigError(
                f"{node['_target_']} must know when training ends, and that isn't known: trainer.max_steps is null, "
                "and so is max_epochs, or the number of steps in an epoch of a stream is unknown.\n"
                "Set trainer.max_steps, or scheduler.total_steps."
            )
    scheduler = _build(key, node, optimizer, **supplied)
    if not isinstance(scheduler, LRScheduler):
        raise _wrong_result(key, node, scheduler, expected="a torch.optim.lr_scheduler.LRScheduler")
    if isinstance(scheduler, OneCycleLR) and total_steps is not None and scheduler.total_steps < total_steps:
        raise ConfigError(
            f"{node['_target_']} ends after {scheduler.total_steps} steps and can't continue, and the run has "
            f"{total_steps}.\nSet its total_steps to at least that, or train for fewer steps."
        )
    return Schedule(
        scheduler,
        interval=settings.interval,
        monitor=settings.monitor,
        total_steps=length,
        may_stretch=settings.total_steps is not None,
    )


def build_callbacks(nodes: Mapping[str, Node], *, context: Context, run_dir: RunDir) -> dict[str, Callback]:
    """The callbacks by name, in the config's order. Raises TargetError for a misspelt hook.

    Those that take `context` or `run_dir` get them.
    """
    known = {"context": context, "run_dir": run_dir}
    callbacks: dict[str, Callback] = {}
    for name, node in nodes.items():
        key = f"callbacks.{name}"
        callback = _build(key, node, **{keyword: known[keyword] for keyword in known if takes(node, keyword)})
        for attribute in dir(callback):
            is_hook = attribute.startswith("on_") and callable(getattr(callback, attribute))
            if is_hook and attribute not in _HOOKS:
                hint = did_you_mean(nearest(attribute, _HOOKS))
                raise TargetError(
                    f"{key}: {node['_target_']}.{attribute} isn't a hook and would never be called.{hint}"
                )
        if not any(callable(getattr(callback, hook, None)) for hook in _HOOKS):
            raise _wrong_result(key, node, callback, expected=f"a callback, with one of {', '.join(_HOOKS)}")
        callbacks[name] = callback
    return callbacks


def check_precision_fits(precision: Precision, strategy: Strategy) -> None:
    """Raise ConfigError where the strategy's own number formats can't go with `trainer.precision`."""
    check = getattr(strategy, "check_precision", None)
    if check is not None:
        check(precision)


def check_callbacks_fit(nodes: Mapping[str, Node], strategy: Strategy) -> None:
    """Raise ConfigError for a callback with weights of its own where the strategy spreads the model's over ranks.

    And for one that compares replicas, for what its `compares_replicas` says, where they differ; and for one that
    averages buffers, unless its keyword `averages_buffers_by` is false, where each rank has its own.
    """
    if buffers_differ(strategy):
        _check_no_averaged_buffers(nodes)
    for node in nodes.values() if replicas_differ(strategy) else ():
        comparing = getattr(import_target(node["_target_"]), "compares_replicas", None)
        if comparing is not None:
            raise ConfigError(
                f"{comparing} compares what each process has after every step with what one process has, and under "
                f"{type(strategy).__name__} each has gradients and weights of its own between two averages.\n"
                "Compare with strategy=allreduce: all that else depends on the number of processes does so there too."
            )
    if not forward_communicates(strategy):
        return
    for name, node in nodes.items():
        hook = getattr(import_target(node["_target_"]), "evaluation_weights", None)
        if hook is not None and hook is not Callback.evaluation_weights:
            raise ConfigError(
                f"callbacks.{name} keeps a whole copy of the model to evaluate, and strategy="
                f"{type(strategy).__name__.lower()} leaves no rank with a whole one.\n"
                f"Leave the callback out (~callbacks.{name}), or use strategy=ddp."
            )


def _check_no_averaged_buffers(nodes: Mapping[str, Node]) -> None:
    for name, node in nodes.items():
        keyword = getattr(import_target(node["_target_"]), "averages_buffers_by", None)
        if keyword is not None and node.get(keyword, True):
            raise ConfigError(
                f"callbacks.{name} averages buffers (BatchNorm's statistics) too, and strategy.broadcast_buffers=false "
                "leaves each process its own: a checkpoint has the first one's average, and a run that is resumed "
                f"would evaluate with that on all.\nUse callbacks.{name}.{keyword}=false, with which each process "
                "evaluates with the buffers it has, or strategy.broadcast_buffers=true."
            )


def build_loggers(nodes: Mapping[str, Node], *, run_dir: RunDir, redraws: bool = True) -> dict[str, Logger]:
    """The loggers by name, in the config's order. Call it on rank 0 only: they open files.

    Loggers that take `run_dir` or `redraws` get them, unless the config sets them. redraws: False under a debugger,
    where lines on the terminal must not be redrawn.
    """
    known = {"run_dir": run_dir, "redraws": redraws}
    loggers: dict[str, Logger] = {}
    for name, node in nodes.items():
        key = f"logger.{name}"
        supplied = {keyword: known[keyword] for keyword in known.keys() - node.keys() if takes(node, keyword)}
        built = _build(key, node, **supplied)
        loggers[name] = _with_methods(key, node, built, names=("metrics", "text", "close"))
    return loggers


def _build(key: str, node: Node, *args: Any, **supplied: Any) -> Any:
    """Build what is inside the node through Hydra, then call its target with what the framework supplies.

    In two moves, because Hydra would copy what it is handed into config containers. All containers reach targets as
    plain lists and dicts: a ListConfig in an optimizer's state would make its checkpoint unreadable.
    """
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
    # Outside the handlers, so that the error keeps the context it was raised in.
    if not isinstance(error, DataError):  # which says where the data is missing or wrong itself
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
    return TargetError(f"{key}: {node['_target_']} gave {_described(result)}. It must give {expected}.")


def _described(result: Any) -> str:
    return "None" if result is None else f"an object of type {type(result).__module__}.{type(result).__qualname__}"


def _too_many_devices(node: Node, *, context: Context) -> str:
    topology = context.topology
    told = f"{node['_target_']} can't use {topology.span} devices: it takes no keyword `devices`.\n"
    if topology.gpus_per_node == 0:
        return (
            f"{told}Use topology.gpus_per_process=1 topology.min_gpus_per_process=1, or a model that takes `devices`."
        )
    if topology.shares_gpus:
        return f"{told}Use topology.gpus_per_process=1 topology.min_gpus_per_process=1, or a model that takes it."
    return (
        f"{told}Give each process one GPU: topology.procs_per_node={topology.gpus_per_node} "
        "topology.gpus_per_process=auto topology.min_gpus_per_process=1,\n"
        f"or use fewer GPUs: trainer.gpus={topology.procs_per_node} topology.gpus_per_process=auto "
        "topology.min_gpus_per_process=1; or use a model that takes it."
    )
