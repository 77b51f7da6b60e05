"""What a run would take, found without running it: the model on the meta device, the optimizer really stepped.

For `job=plan`. Opens no GPU, allocates nothing of the model's size, meets nobody; the same on every machine.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from framework import build
from framework.activations import recompute
from framework.causes import place, said
from framework.config.parse import parse
from framework.config.schema import Config
from framework.data.batching import BatchPlan
from framework.data.loader import check_everyone_gets_one, dataset_size
from framework.distributed.context import Context
from framework.engine import check_monitors, check_validation, schedule_length
from framework.errors import DataError, FrameworkError, TargetError
from framework.footprint import checkpoint_bytes, optimizer_state, tensor_bytes
from framework.limits import overfitted, shortened, steps_per_epoch, total_steps
from framework.precision import PrecisionPlugin
from framework.progress import hooks
from framework.run_dir import RunDir
from framework.session import batch_plan
from framework.strategies.stages import cut
from framework.streams import check_streams, streams_of
from framework.topology import Topology
from framework.types import (
    Callback,
    Datasets,
    Sharding,
    Strategy,
    copies_gradients,
    data_share,
    exchanges_every,
    forward_communicates,
    gradients_kept,
    num_stages,
    replicas_differ,
    sharding_of,
    weight_copies,
)

_META = torch.device("meta")
_STAND_IN_SIZE = 1000  # samples, where only the set-up is to be checked


def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`facts` of the plain arguments `config` (as in config.yaml), `topology` (its fields) and `backend`.

    From here on this process reaches no other over a network.
    """
    sys.addaudithook(_refuse_side_effects)
    return facts(parse(arguments["config"]), Topology(**arguments["topology"]), backend=arguments["backend"])


def facts(config: Config, topology: Topology, *, backend: str) -> dict[str, Any]:
    """Plain values under `strategy`, `spread`, `spread_over`, `exchanges_every`, `batch`, `data`, `steps`, `model`,
    `optimizer`, `memory`, `traffic`, `checkpoint`, `notes`: bytes, samples and steps.

    As a rank does before the process group is made, and what it would build after that; loggers, which open files,
    aside. None stands for what can't be known, and a note says why. Raises FrameworkError for what training would
    refuse, and where the model can't be built on the meta device.
    """
    requested, config = config, shortened(config)
    context = Context(topology, 0, 0, 0, devices=(_META,) * topology.span, backend=backend)
    notes: list[str] = []
    build.check_targets(config)
    strategy = build.build_strategy(config.strategy, context=context)
    build.check_callbacks_fit(config.callbacks, strategy)
    build.check_precision_fits(config.trainer.precision, strategy)
    share = data_share(strategy, rank=0, world_size=topology.world_size)
    plan = batch_plan(config, share)
    datasets, data = _data(config, plan, notes, strategy=strategy)
    steps = _steps(config, plan, datasets)
    if datasets is not None:
        unvalidated = check_validation(config, datasets, steps_per_epoch=steps["per_epoch"])
        notes += [] if unvalidated is None else [unvalidated]
    build.build_task(config.task)
    # Nothing is written: there will be no run.
    nowhere = RunDir(Path(config.path.outputs))
    callbacks = build.build_callbacks(config.callbacks, context=context, run_dir=nowhere)
    return {
        "strategy": type(strategy).__name__,
        "spread": forward_communicates(strategy),
        "exchanges_every": exchanges_every(strategy),
        "spread_over": sharding_of(strategy, world_size=context.world_size).ranks,
        "batch": _batch(plan, accumulate=config.trainer.accumulate_grad_batches),
        "data": data,
        "steps": steps,
        **_sizes(
            config,
            context,
            callbacks=callbacks,
            length=schedule_length(
                requested, _STAND_IN_SIZE if datasets is None else _steps(requested, plan, datasets)["per_epoch"]
            ),
            notes=notes,
            strategy=strategy,
        ),
        "notes": notes,
    }


def _batch(plan: BatchPlan, *, accumulate: int) -> dict[str, Any]:
    least, most = plan.global_batch_size // plan.world_size, plan.largest_share
    return {
        "global": plan.global_batch_size,
        "per_rank": {"least": least, "most": most},
        "per_forward": {"least": least // plan.micro_batches, "most": -(-most // plan.micro_batches)},
        "accumulate_grad_batches": accumulate,
        "num_microbatches": plan.micro_batches // accumulate,
    }


# Data


def _data(
    config: Config, plan: BatchPlan, notes: list[str], *, strategy: Strategy
) -> tuple[Datasets | None, dict[str, Any]]:
    """The datasets, or a stand-in of `plan.train_samples`, or None; and how many samples there are, from where."""
    streams: list[str] = []
    try:
        datasets, source = build.build_datasets(config.data.datasets), "data"
    except (DataError, OSError) as error:
        if config.plan.train_samples is None:
            notes.append(
                f"The data isn't here, so the steps of an epoch aren't known; plan.train_samples=NUMBER gives them.\n"
                f"{error}"
            )
            return None, {"train": None, "val": None, "test": None, "streams": streams, "source": None}
        datasets, source = Datasets(train=range(config.plan.train_samples)), "plan.train_samples"
    else:
        check_streams(config, datasets, strategy)
        check_monitors(config, datasets)
        streams = streams_of(datasets)
    sizes = {
        part: None if each is None or part in streams else dataset_size(each, part=part)
        for part, each in _parts(datasets)
    }
    data = {**sizes, "streams": streams, "source": source}
    datasets = overfitted(datasets, config.trainer, plan)
    if isinstance(datasets.train, IterableDataset):
        notes.append("The train part is a stream: nobody knows how many samples it has, nor how many steps an epoch.")
    else:
        check_everyone_gets_one(len(datasets.train), plan)
    return datasets, data


def _parts(datasets: Datasets) -> list[tuple[str, Any]]:
    return list(zip(Datasets._fields, datasets, strict=True))


def _steps(config: Config, plan: BatchPlan, datasets: Datasets | None) -> dict[str, Any]:
    """Optimizer steps. Without data, the total is known only where `max_steps` alone decides it."""
    settings = config.trainer
    limits = {"max_epochs": settings.max_epochs, "max_steps": settings.max_steps}
    if datasets is None:
        return {"per_epoch": None, "total": settings.max_steps if settings.max_epochs is None else None, **limits}
    size = None if isinstance(datasets.train, IterableDataset) else len(datasets.train)
    per_epoch = steps_per_epoch(settings, plan, size=size)
    return {"per_epoch": per_epoch, "total": total_steps(settings, steps_per_epoch=per_epoch), **limits}


# Model, optimizer, checkpoint


def _sizes(
    config: Config,
    context: Context,
    *,
    callbacks: Mapping[str, Callback],
    length: int | None,
    notes: list[str],
    strategy: Strategy,
) -> dict[str, Any]:
    model = _build_model(config, context, num_stages=num_stages(strategy))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build.build_optimizer(config.optimizer, model.parameters())
    build.build_scheduler(config.scheduler, optimizer, length)
    parameters, gradients = tensor_bytes(model.parameters()), tensor_bytes(trainable)
    try:
        state = optimizer_state(lambda tensors: build.build_optimizer(config.optimizer, tensors), model.parameters())
    except Exception as error:  # of an optimizer that may be the user's own: it has its say, and the rest is known
        state = None
        notes.append(f"The optimizer's state isn't known: it can't step without training ({said(error)}).")
    # A callback with weights of its own to evaluate keeps a second copy of the model, and in a checkpoint both.
    averaging = len(hooks(callbacks.values(), "evaluation_weights"))
    world, buffers = context.world_size, tensor_bytes(model.buffers())
    sharding = sharding_of(strategy, world_size=world)
    is_cut = num_stages(strategy) is not None
    gathered = _bytes_as(model.parameters(), sharding.param_dtype)
    parts = sharding.ranks
    around = (Sharding(1), world // parts) if is_cut else (sharding, world)  # stages only meet their copies
    cuts = parts if is_cut else 1
    reduced = -(-_bytes_as(trainable, sharding.reduce_dtype) // cuts) if world > cuts else 0
    notes += _notes_on_stages(strategy, model) if is_cut else _notes_on_spreading(sharding)
    recompute(model, config.trainer.activation_checkpointing)
    return {
        "model": _named(model, trainable),
        "memory": {
            "parameters": -(-parameters // parts),
            "gradients": -(-gradients // parts),
            "buckets": reduced if copies_gradients(strategy) else 0,
            "optimizer": None if state is None else -(-tensor_bytes(state.tensors()) // parts),
            "buffers": buffers,
            "averages": averaging * (parameters + buffers),
            "anchors": weight_copies(strategy) * gradients,
            "errors": gradients_kept(strategy) * gradients,
        },
        "traffic": _traffic(*around, reduced=reduced, gathered=gathered, every=exchanges_every(strategy)),
        "optimizer": config.optimizer["_target_"].rpartition(".")[2],
        "checkpoint": None
        if state is None or not config.checkpoint.enabled
        else checkpoint_bytes(
            model,
            state,
            world_size=world,
            gpus=_gpus(context),
            averages=averaging,
            replicas=world if replicas_differ(strategy) else 1,
            anchors=weight_copies(strategy),
            gradients=gradients_kept(strategy),
        ),
    }


def _traffic(sharding: Sharding, world: int, *, reduced: int, gathered: int, every: int) -> dict[str, int]:
    """Bytes of one step: its share, where weights as large as the gradients are exchanged once in several.

    Within each copy gradients go around once in place of twice, and weights twice; then copies average shares.
    """
    ranks, copies = sharding.ranks, world // sharding.ranks
    within = (ranks - 1) * (reduced + 2 * gathered) // ranks
    between = 2 * (copies - 1) * (reduced // ranks) // copies
    return {"reduced": reduced // every, "ring_per_rank": (within + between) // every}


def _named(model: nn.Module, trainable: Iterable[Tensor]) -> dict[str, Any]:
    counts = {"parameters": _count(model.parameters()), "trainable": _count(trainable)}
    return {"name": type(model).__name__, **counts}


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _bytes_as(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> int:
    return tensor_bytes(tensors) if dtype is None else _count(tensors) * dtype.itemsize


def _notes_on_stages(strategy: Strategy, model: nn.Module) -> list[str]:
    """Raises FrameworkError for a model that can't be cut into them."""
    cut(model, num_stages(strategy) or 1)
    return [
        "The model is cut into stages: what a rank has is a mean, as stages needn't be of the same size. Activations "
        "that pass between them aren't counted. Each process makes the whole model on the CPU first."
    ]


def _notes_on_spreading(sharding: Sharding) -> list[str]:
    notes = []
    if sharding.ranks > 1:
        notes.append(
            "The model is spread over the ranks: each has its share of weights, gradients and optimizer state. While a "
            "module computes, its weights and gradients are there whole besides. Weights are gathered for the forward "
            "and again for the backward, which is in what a rank sends and receives."
        )
    if sharding.is_on_cpu:
        notes.append(
            "Weights, gradients and optimizer state of each rank are in the CPU's memory (strategy.cpu_offload=true); "
            "what is whole while a module computes is in the GPU's."
        )
    return notes


def _gpus(context: Context) -> int:
    return context.topology.span if context.topology.gpus_per_node else 0


def _build_model(config: Config, context: Context, *, num_stages: int | None) -> nn.Module:
    """The model as `build_model` gives it, in the precision's type, without any memory of its size."""
    try:
        with torch.device(_META):
            model = build.build_model(config.model, context=context, num_stages=num_stages)
    except FrameworkError:
        raise
    except Exception as error:  # whatever the user's class does there
        raise TargetError(
            f"model: {config.model['_target_']} can't be built on PyTorch's meta device, where tensors have a shape "
            f"and no values.\n{said(error)}\n{place(error)}\n"
            "A plan needs a model whose making reads no tensor's value (no .item(), no .tolist(), no generator)."
        ) from error
    # The kind of device matters to autocast alone, and meta has none.
    return PrecisionPlugin(config.trainer.precision, device=torch.device("cpu")).convert_model(model)


def _refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: https://docs.python.org/3/library/audit_events.html."""
    if event == "framework.keep":
        raise PermissionError(f"job=plan writes nothing, and {arguments[0]} isn't there yet.")
    if event == "framework.download":
        raise DataError(f"{arguments[0]} isn't in {arguments[1]}, and job=plan downloads nothing.")
    if event == "socket.getaddrinfo":
        raise DataError(f"job=plan downloads nothing, and something asked for the address of {arguments[0]}.")
    if event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        raise DataError(f"job=plan downloads nothing, and something connects to {arguments[1]}.")
