"""What rank 0 prints and logs before the first step: the model and its memory, the data, the processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from framework.config.optimizers import optimizer_configs
from framework.config.saved import written_config
from framework.distributed.sharded import layout_of, local_tensor, num_parameters
from framework.engine import build
from framework.engine.limits import streams_of
from framework.engine.setup import RankSetup
from framework.engine.sizes import checkpoint_bytes, tensor_bytes
from framework.media import Text
from framework.monitoring.report import FailureReport
from framework.system.formatting import format_bytes, format_count, format_facts
from framework.system.rank_log import logger, show
from framework.system.run_dir import read_object
from framework.training.length import total_steps
from framework.training.trainer import Trainer
from framework.types import Datasets, hooks

_SHOWN_MODULES = 5  # on the terminal
_LISTED_MODULES = 200  # in the log


@dataclass(frozen=True)
class StateSizes:
    """Bytes of this rank's training state, and of a checkpoint of all ranks."""

    weights: int  # with buffers
    gradients: int
    optimizer: int | None  # None: not known before the first step
    checkpoint: int


def state_sizes(setup: RankSetup, trainer: Trainer) -> StateSizes:
    """Return the sizes; those of optimizer and checkpoint are estimates."""
    model = trainer.state.bare_model
    optimizer: int | None
    try:
        optimizer = 0
        for config, own in zip(optimizer_configs(setup.config.optimizer), trainer.state.optimizers, strict=True):
            parameters = (parameter for group in own.param_groups for parameter in group["params"])
            optimizer += build.optimizer_bytes(config, parameters, model=model)
    except Exception as error:  # a user's optimizer may raise anything; training shows if it works
        logger.info("the size of the optimizer's state isn't known before the first step: %r", error)
        optimizer = None
    checkpoint = checkpoint_bytes(
        model,
        optimizer or 0,
        world_size=setup.context.world_size,
        averages=len(hooks(trainer.state.callbacks.values(), "evaluation_weights")),
        strategy=setup.strategy,
    )
    here = max(sum(each.numel() for each in model.parameters()), 1)  # with several stages, this rank has some of them
    weights = [local_tensor(each) for each in model.parameters()]
    share = sum(each.numel() for each in weights) / here  # of a sharded model
    return StateSizes(
        weights=tensor_bytes([*weights, *model.buffers()]),
        gradients=tensor_bytes(local_tensor(each) for each in model.parameters() if each.requires_grad),
        optimizer=None if optimizer is None else round(optimizer * share),
        checkpoint=checkpoint * num_parameters(model) // here,
    )


def introduce(setup: RankSetup, trainer: Trainer, datasets: Datasets, sizes: StateSizes) -> None:
    """Print what will be trained, unless `trainer.progress=off`; log it and the configuration as texts."""
    state, progress, is_shown = trainer.state, trainer.progress, setup.config.trainer.progress != "off"
    facts = format_facts([*_facts(setup, trainer, datasets, sizes)])
    short, full = (module_table(state.bare_model, rows=rows) for rows in (_SHOWN_MODULES, _LISTED_MODULES))
    if is_shown:
        show(f"{short}\n{facts}")
    if not is_shown or full != short:  # what is printed is in the log, too
        logger.info("the model and its training:\n%s\n%s", full, facts)
    position = f"after step {progress.step:,}, in epoch {progress.epoch}"
    if setup.attempt:
        begins = f"resuming {position}" if progress.step else "starting from scratch"
        text = f"Restart {setup.attempt}: {begins}\nCause: {_cause_of_restart(setup)}"
        show(text)
        trainer.logbook.log_values({"restart": Text(text)})
        trainer.logbook.log_values({"restart/attempt": float(setup.attempt)})
    elif progress.step and is_shown:
        show(f"Resuming {position}")
    trainer.logbook.log_values({"summary": Text(f"{full}\n{facts}"), "config": Text(written_config(setup.run_dir))})


def module_table(model: nn.Module, *, rows: int) -> str:
    """Return a table of the model's modules that have parameters, as deep as `rows` lines allow."""
    found = list(_modules(model, depth=1))
    for depth in count(2):
        deeper = list(_modules(model, depth=depth))
        if len(deeper) == len(found) or len(deeper) > rows:
            break
        found = deeper
    num_left_out = len(found) - rows + 1 if len(found) > rows else 0
    found = found[: len(found) - num_left_out]
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    parameters, part = num_parameters(model), "" if layout_of(model) is None else "rank 0's part"
    whole = _Module(type(model).__name__, part, 0, parameters, parameters - frozen)
    lines = [("model", "", "parameters", "trainable")]
    for name, kind, depth, parameters, trained in (whole, *found):
        trainable = "all" if trained == parameters else f"{trained:,}" if trained else "none"
        lines.append((f"{'  ' * depth}{name}", kind, f"{parameters:,}", trainable))
    if num_left_out:
        lines.append((f"  … {num_left_out} more", "", "", ""))
    # Not by rich, which takes 50 ms to load: training waits for this.
    names, kinds, numbers, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        f"  {name:<{names}}  {kind:<{kinds}}  {number:>{numbers}}  {trained}".rstrip()
        for name, kind, number, trained in lines
    )


class _Module(NamedTuple):
    name: str
    kind: str
    depth: int
    parameters: int
    trained: int


def _modules(module: nn.Module, *, depth: int, level: int = 1, prefix: str = "") -> Iterator[_Module]:
    """Yield the modules inside `module` down to a depth, parents first."""
    for name, child in module.named_children():
        parameters = sum(each.numel() for each in child.parameters())
        if parameters:
            yield _Module(f"{prefix}{name}", _kind(child), level, parameters, _num_trained(child))
            if level < depth:
                yield from _modules(child, depth=depth, level=level + 1, prefix=f"{prefix}{name}.")


def _kind(module: nn.Module) -> str:
    """Return the class's name; `4 × Block` for a container of several modules of one class."""
    inside = [type(each).__name__ for each in module.children()]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(inside) > 1 and len(set(inside)) == 1
    return f"{len(inside)} × {inside[0]}" if is_list else type(module).__name__


def _num_trained(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def _facts(setup: RankSetup, trainer: Trainer, datasets: Datasets, sizes: StateSizes) -> Iterator[tuple[str, str]]:
    context, config, plan = setup.context, setup.config, setup.plan
    named = [("weights", sizes.weights), ("gradients", sizes.gradients), ("optimizer", sizes.optimizer)]
    each = "each process: " if context.world_size > 1 else ""
    memory = ", ".join(f"{name} {'unknown' if size is None else format_bytes(size)}" for name, size in named)
    saved = f", checkpoint about {format_bytes(sizes.checkpoint)}" if config.checkpoint.enabled else ""
    yield "memory", f"{each}{memory}{saved}"
    streams = streams_of(datasets)
    parts = datasets.parts.items()
    samples = ", ".join(f"{name} {'a stream' if name in streams else f'{len(part):,}'}" for name, part in parts)
    yield "data", f"{samples}{'' if streams else ' samples'}"
    steps = trainer.train_loader.steps_per_epoch
    total = total_steps(config.trainer, steps_per_epoch=steps, start=trainer.start_of_run())
    factors = f"{plan.global_batch_size // plan.world_size // plan.micro_batches} a forward"
    if plan.micro_batches > 1:
        factors += f" × {plan.micro_batches} accumulated"
    if plan.world_size > 1:
        factors += f" × {plan.world_size} processes"
    is_split = plan.world_size * plan.micro_batches > 1
    batch = f"global batch {plan.global_batch_size}" + (f" ({factors})" if is_split else "")
    per_epoch = "an unknown number of steps" if steps is None else format_count(steps, "step")
    yield "steps", f"{batch}, {per_epoch} an epoch" + ("" if total is None else f", {total:,} in total")
    yield "processes", _processes(setup)


def _processes(setup: RankSetup) -> str:
    context, topology = setup.context, setup.context.topology
    devices = ", ".join(dict.fromkeys(map(str, context.devices)))
    if context.device.type == "cuda":
        devices += f" ({torch.cuda.get_device_name(context.device)})"
    number = format_count(context.world_size, "process", "processes")
    nodes = f" on {topology.nnodes} nodes" if topology.nnodes > 1 else ""
    strategy = type(setup.strategy).__name__
    return f"{number}{nodes}, {devices}, {context.backend}, {strategy}, {setup.config.trainer.precision}"


def _cause_of_restart(setup: RankSetup) -> str:
    file = setup.run_dir.failure_of(node=0, attempt=setup.attempt - 1, is_last=False)
    plain = read_object(file)
    if plain is None:
        return f"not known: there is no {file.name}"
    first = FailureReport.from_plain(plain).first
    return f"rank {first.rank}: {first.cause}"
