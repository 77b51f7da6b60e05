"""Estimate sizes and steps of a run, with the model on the meta device: no GPU, no memory, no other process.

The result is the same on every machine, except for the times with `plan.measure`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from framework.config.optimizers import OptimizerConfig, described, optimizer_configs
from framework.config.parse import parse
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.data.batching import BatchPlan
from framework.data.epochs import EpochSizes, EpochSteps
from framework.data.folds import apply_folds
from framework.data.loader import dataset_size
from framework.distributed.context import Context
from framework.engine.assemble import assemble
from framework.engine.builders.data import build_data
from framework.engine.builders.observers import build_callbacks
from framework.engine.builders.optimizer import build_optimizer
from framework.engine.builders.schedule import build_schedule
from framework.engine.data_checks import (
    check_lists,
    check_metrics,
    check_source,
    check_streams,
    check_validation,
    monitored,
    streams_of,
)
from framework.engine.limits import apply_fast_dev_run, apply_overfit_batches, train_sizes
from framework.engine.loaders import with_batch_sizes
from framework.engine.setup import plan_steps, plan_training
from framework.engine.state_bytes import average_bytes, checkpoint_bytes, optimizer_bytes, tensor_bytes
from framework.errors import DataError, describe_error
from framework.launch.rank_environment import become_first_rank
from framework.optim.objectives import objectives_of
from framework.optim.param_groups import ParamGroups
from framework.remote.place import outputs_folder
from framework.strategies.activation_checkpointing import apply_activation_checkpointing
from framework.strategies.base import Strategy, StrategyCosts
from framework.strategies.pipeline_stages import split_into_stages
from framework.system.run_dir import RunDir
from framework.training.length import epoch_steps, schedule_length, total_steps
from framework.types import Datasets, hooks

_META = torch.device("meta")
# Steps of an epoch, to check the set-up without data.
_STAND_IN_STEPS = 1000
_SHOWN_EPOCHS = 8


def estimate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `facts` of `config` (as in config.yaml), `topology` (its fields) and `backend`.

    From now on this process can neither download nor connect to another machine.
    """
    sys.addaudithook(_refuse_side_effects)
    config = parse(arguments["config"])
    topology = Topology(**arguments["topology"])
    become_first_rank(config.launcher, topology)
    backend = arguments["backend"]
    estimates = facts(config, topology, backend=backend)
    trace = None
    if config.plan.device is not None:
        # It imports what only a forecast needs.
        from framework.jobs.plan.memory import forecast

        memory = estimates["memory"]
        kept_bytes = memory["averages"] + memory["anchors"] + memory["errors"]
        state_bytes = memory["parameters"] + memory["gradients"] + (memory["optimizer"] or 0)
        values, trace = forecast(config, topology, kept_bytes=kept_bytes, state_bytes=state_bytes)
        if memory["optimizer"] is None:
            # LBFGS keeps up to 100 earlier directions, which the first steps don't have.
            values["notes"].append("The optimizer's state isn't known before training, so the peak may be much higher.")
        values["time"] = None
        if trace is not None:
            from framework.jobs.plan.device_time import device_time

            values["time"] = device_time(trace, config, topology, device=values["device"]["name"], plan=estimates)
        estimates["forecast"] = values
    if config.plan.measure:
        # It imports what only this needs.
        from framework.jobs.plan.work import work_of_step

        of_this_device = trace if config.plan.device == "this" else None
        estimates["time"] = work_of_step(config, topology, trace=of_this_device)
    return estimates


def facts(config: Config, topology: Topology, *, backend: str) -> dict[str, Any]:
    """Return plain values: bytes, samples and steps, under the keys listed in `plan.job`.

    Does what a rank does before the process group is made, except for loggers, which open files. None stands for an
    unknown value, which a note explains. Raises FrameworkError for what training would refuse, and if the model can't
    be built on the meta device.
    """
    requested = config
    config = apply_fast_dev_run(config)
    context = Context(topology, 0, 0, 0, devices=(_META,) * topology.span, backend=backend)
    notes: list[str] = []
    strategy, plan = plan_training(config, context)

    datasets, data = _data(config, plan, notes, context=context, strategy=strategy)
    if datasets is not None:
        requested = with_batch_sizes(requested, datasets)
        config = with_batch_sizes(config, datasets)
        plan = plan_steps(config, context, strategy)
    steps = _epoch_steps(config, plan, datasets)
    total = total_steps(config.trainer, steps=steps)
    notes += _notes_of_lengths(config, steps)
    if datasets is not None:
        warning = check_validation(config, datasets, steps=steps)
        if warning is not None:
            notes.append(warning)

    assembled = assemble(requested, context, num_stages=strategy.num_stages)
    optimizer_names = [optimizer.name for optimizer in optimizer_configs(config.optimizer)]
    objectives = objectives_of(assembled.task, optimizers=optimizer_names)
    if objectives is not None:
        strategy.allow_unused_parameters()
    # Nothing is written to this directory.
    run_dir = RunDir(outputs_folder(config.path))
    callbacks = build_callbacks(config.callbacks, context=context, run_dir=run_dir)
    requested_steps: EpochSteps | None = EpochSteps(EpochSizes(_STAND_IN_STEPS * plan.global_batch_size), plan)
    if datasets is not None:
        requested_steps = _epoch_steps(requested, plan, datasets)
    sizes = _sizes(
        config,
        context,
        strategy,
        assembled.model,
        # A callback that evaluates averaged weights keeps a second copy of the model, also in a checkpoint.
        averages=len(hooks(callbacks.values(), "evaluation_weights")),
        schedule_length=partial(schedule_length, requested, requested_steps, objectives=objectives),
        total=total,
        notes=notes,
    )
    costs = strategy.costs()
    least = plan.global_batch_size // plan.world_size
    most = plan.largest_share
    return {
        "strategy": type(strategy).__name__,
        "exchanges_every": costs.exchanges_every,
        "shards": costs.num_shards,
        "batch": {
            "global": plan.global_batch_size,
            "per_rank": {"least": least, "most": most},
            "per_forward": {"least": least // plan.micro_batches, "most": math.ceil(most / plan.micro_batches)},
            "accumulate_grad_batches": config.trainer.accumulate_grad_batches,
            "num_microbatches": plan.micro_batches // config.trainer.accumulate_grad_batches,
        },
        "data": data,
        "steps": {
            "per_epoch": None if steps is None else steps.constant,
            "total": total,
            "max_epochs": config.trainer.max_epochs,
            "max_steps": config.trainer.max_steps,
        },
        **sizes,
        "notes": notes,
    }


# Data


def _data(
    config: Config, plan: BatchPlan, notes: list[str], *, context: Context, strategy: Strategy
) -> tuple[Datasets | None, dict[str, Any]]:
    """Return the datasets, or a stand-in of `plan.train_samples`, or None; and the number of samples of each part."""
    sizes: dict[str, int | None] = {"train": None, "val": None, "test": None}
    streams: list[str] = []
    source = "data"
    try:
        datasets = build_data(config, context)
    except (DataError, OSError) as error:
        if config.plan.train_samples is None:
            notes.append(
                f"The data isn't on this machine; set plan.train_samples=NUMBER to get the steps of an epoch.\n{error}"
            )
            return None, {**sizes, "streams": streams, "source": None}
        datasets = apply_folds(Datasets(train=range(config.plan.train_samples)), config.data)
        source = "plan.train_samples"
    else:
        check_streams(config, datasets, strategy)
        check_source(config, datasets, strategy, context)
        check_lists(config, datasets, processes=plan.world_size)
        if datasets.val is None:
            check_metrics(monitored(config), ())
        streams = streams_of(datasets)

    for part, dataset in datasets.parts.items():
        if part not in streams:
            sizes[part] = dataset_size(dataset, split=part)
    data = {**sizes, "streams": streams, "source": source}
    datasets = apply_overfit_batches(datasets, config.trainer, plan)
    if isinstance(datasets.train, IterableDataset):
        notes.append("The train part is a stream: its number of samples and the steps of an epoch are unknown.")
    else:
        # Raises DataError if there are fewer samples than processes.
        train_sizes(datasets, processes=plan.world_size)
    return datasets, data


def _epoch_steps(config: Config, plan: BatchPlan, datasets: Datasets | None) -> EpochSteps | None:
    """Return the optimizer steps of each epoch; None if they are unknown."""
    if datasets is None:
        return None
    sizes = None
    if not isinstance(datasets.train, IterableDataset):
        sizes = train_sizes(datasets)
    return epoch_steps(config.trainer, plan, sizes=sizes)


def _notes_of_lengths(config: Config, steps: EpochSteps | None) -> Iterator[str]:
    """Yield a note with the steps of the first epochs if epochs differ."""
    if steps is None or steps.constant is not None:
        return
    epochs = config.trainer.max_epochs
    shown = _SHOWN_EPOCHS
    if epochs is not None:
        shown = min(epochs, _SHOWN_EPOCHS)
    numbers = [f"{steps.of(epoch):,}" for epoch in range(shown)]
    if epochs != shown:
        numbers.append("…")
    yield f"Epochs differ in length, as the sampler has it: {', '.join(numbers)} steps."


# Model, optimizer, checkpoint


def _sizes(
    config: Config,
    context: Context,
    strategy: Strategy,
    model: nn.Module,
    *,
    averages: int,
    schedule_length: Callable[[str], int | None],
    total: int | None,
    notes: list[str],
) -> dict[str, Any]:
    """Return the sizes of model, memory, traffic and checkpoint.

    Args:
        averages: further copies of the model that callbacks keep.
        total: optimizer steps of the run; None if unknown.
    """
    configs = optimizer_configs(config.optimizer)
    param_groups = ParamGroups.of(model, configs)
    optimizer = build_optimizer(param_groups, model, total_steps=total)
    build_schedule(config.scheduler, optimizer, configs, length=schedule_length)
    groups = _groups(param_groups, model, notes)
    state_bytes = None
    if all(group["state"] is not None for group in groups):
        state_bytes = sum(group["state"] for group in groups)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    costs = strategy.costs()
    # A stage exchanges gradients only with its copies.
    stages = 1
    if strategy.num_stages is not None:
        stages = costs.num_shards
    reduced_bytes = 0
    if context.world_size > stages:
        reduced_bytes = math.ceil(tensor_bytes(trainable, costs.reduce_dtype) / stages)
    memory = _memory(model, costs, averages=averages, reduced_bytes=reduced_bytes, state_bytes=state_bytes)
    gathered_bytes = tensor_bytes(model.parameters(), costs.param_dtype)

    # Both raise FrameworkError for a model that they don't fit.
    if strategy.num_stages is not None:
        split_into_stages(model, strategy.num_stages)
    apply_activation_checkpointing(model, config.trainer.activation_checkpointing)

    checkpoint = None
    if state_bytes is not None and config.checkpoint.enabled:
        checkpoint = checkpoint_bytes(
            model,
            state_bytes,
            world_size=context.world_size,
            averages=averages,
            strategy=strategy,
            only_trained=config.checkpoint.only_trained,
        )
    return {
        "model": {
            "name": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "trainable": sum(parameter.numel() for parameter in trainable),
        },
        "memory": memory,
        "traffic": _traffic(
            costs.exchanges_every,
            costs.num_shards // stages,
            context.world_size // stages,
            reduced=reduced_bytes,
            gathered=gathered_bytes,
        ),
        "optimizer": described(config.optimizer),
        "groups": groups,
        "checkpoint": checkpoint,
    }


def _memory(
    model: nn.Module, costs: StrategyCosts, *, averages: int, reduced_bytes: int, state_bytes: int | None
) -> dict[str, int | None]:
    """Return the bytes on each rank, under the keys listed in `plan.job`."""
    parameter_bytes = tensor_bytes(model.parameters())
    gradient_bytes = tensor_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer_state_bytes = None
    if state_bytes is not None:
        optimizer_state_bytes = math.ceil(state_bytes / costs.num_shards)
    return {
        "parameters": math.ceil(parameter_bytes / costs.num_shards),
        "gradients": math.ceil(gradient_bytes / costs.num_shards),
        "buckets": reduced_bytes if costs.copies_gradients else 0,
        "optimizer": optimizer_state_bytes,
        "buffers": tensor_bytes(model.buffers()),
        "averages": averages * average_bytes((*model.parameters(), *model.buffers())),
        "anchors": costs.weight_copies * gradient_bytes,
        "errors": costs.gradients_kept * gradient_bytes,
    }


def _groups(param_groups: ParamGroups, model: nn.Module, notes: list[str]) -> list[dict[str, Any]]:
    """Return the facts of each parameter group."""
    groups = []
    for config, parameters_by_label in param_groups.groups(model):
        for label, parameters in parameters_by_label.items():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            groups.append(
                {
                    "name": label,
                    "optimizer": config.node["_target_"].rpartition(".")[2],
                    "tensors": len(parameters),
                    "parameters": sum(parameter.numel() for parameter in parameters),
                    "trainable": sum(parameter.numel() for parameter in trained),
                    "state": _state_bytes(config, trained, model, notes),
                }
            )
    return groups


def _state_bytes(
    config: OptimizerConfig, trained: Sequence[nn.Parameter], model: nn.Module, notes: list[str]
) -> int | None:
    try:
        return optimizer_bytes(config, trained, model=model)
    except Exception as error:
        # It may be the user's own optimizer. The other sizes are still known.
        notes.append(f"The optimizer's state isn't known: it can't step without training ({describe_error(error)}).")
        return None


def _traffic(every: int, ranks: int, world: int, *, reduced: int, gathered: int) -> dict[str, int]:
    """Return the bytes of one step.

    every: steps from one exchange to the next. ranks: over how many each copy of the model is sharded.

    Within a copy, gradients go around the ring once and weights twice; between copies, gradient shards go twice. An
    exchange of weights instead is as large as one of gradients.
    """
    copies = world // ranks
    within = (ranks - 1) * (reduced + 2 * gathered) // ranks
    between = 2 * (copies - 1) * (reduced // ranks) // copies
    return {"reduced": reduced // every, "ring_per_rank": (within + between) // every}


def _refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: https://docs.python.org/3/library/audit_events.html."""
    if event == "framework.download":
        raise DataError(f"{arguments[0]} isn't in {arguments[1]}, and job=plan downloads nothing.")
    if event == "socket.getaddrinfo":
        raise DataError(f"job=plan downloads nothing, and something asked for the address of {arguments[0]}.")
