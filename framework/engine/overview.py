"""The table before the first step, which rank 0 prints and logs: the model and its memory, the data, the processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from framework.config.saved import written_config
from framework.distributed.sharded import layout_of, num_parameters
from framework.engine.data_checks import streams_of
from framework.engine.setup import RankSetup
from framework.engine.state_bytes import StateSizes
from framework.media import Text
from framework.monitoring.report import FailureReport
from framework.system.formatting import format_bytes, format_count, format_facts
from framework.system.rank_log import logger, show
from framework.system.run_dir import read_object
from framework.training.length import total_steps
from framework.training.trainer import Trainer
from framework.types import Datasets

# Rows of the table of modules, on the terminal and in the log.
_SHOWN_MODULES = 5
_LOGGED_MODULES = 200


def introduce(setup: RankSetup, trainer: Trainer, datasets: Datasets, sizes: StateSizes) -> None:
    """Print what will be trained, unless `trainer.progress=off`; log it and the configuration as texts."""
    model = trainer.state.bare_model
    facts = format_facts(list(_facts(setup, trainer, datasets, sizes)))
    short_table = module_table(model, rows=_SHOWN_MODULES)
    full_table = module_table(model, rows=_LOGGED_MODULES)
    is_shown = setup.config.trainer.progress != "off"
    if is_shown:
        show(f"{short_table}\n{facts}")
    # What is printed is in the log, too.
    if not is_shown or full_table != short_table:
        logger.info("the model and its training:\n%s\n%s", full_table, facts)

    _say_where_it_continues(setup, trainer, is_shown=is_shown)
    summary = Text(f"{full_table}\n{facts}")
    trainer.logbook.log_values({"summary": summary, "config": Text(written_config(setup.run_dir))})


def _say_where_it_continues(setup: RankSetup, trainer: Trainer, *, is_shown: bool) -> None:
    """Show and log a restart with its cause; show where a resumed run continues."""
    progress = trainer.progress
    position = f"after step {progress.step:,}, in epoch {progress.epoch}"
    if setup.attempt:
        begins = f"resuming {position}" if progress.step else "starting from scratch"
        text = f"Restart {setup.attempt}: {begins}\nCause: {_cause_of_restart(setup)}"
        show(text)
        trainer.logbook.log_values({"restart": Text(text)})
        trainer.logbook.log_values({"restart/attempt": float(setup.attempt)})
    elif progress.step and is_shown:
        show(f"Resuming {position}")


# The model


def module_table(model: nn.Module, *, rows: int) -> str:
    """Return a table of the model's modules that have parameters, as deep as `rows` lines allow."""
    modules = list(_modules(model, depth=1))
    for depth in count(2):
        deeper = list(_modules(model, depth=depth))
        if len(deeper) == len(modules) or len(deeper) > rows:
            break
        modules = deeper
    num_left_out = 0
    if len(modules) > rows:
        # One row says how many there are besides.
        num_left_out = len(modules) - rows + 1
        modules = modules[: rows - 1]

    lines = [("model", "", "parameters", "trainable"), _whole_model(model).row]
    lines += [module.row for module in modules]
    if num_left_out:
        lines.append((f"  … {num_left_out} more", "", "", ""))

    # Not by rich, which takes 50 ms to load: training waits for this.
    names, kinds, numbers, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    padded = []
    for name, kind, number, trainable in lines:
        padded.append(f"  {name:<{names}}  {kind:<{kinds}}  {number:>{numbers}}  {trainable}".rstrip())
    return "\n".join(padded)


class _Module(NamedTuple):
    name: str
    kind: str
    depth: int
    num_parameters: int
    num_trained: int

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The module's row of the table."""
        trainable = f"{self.num_trained:,}" if self.num_trained else "none"
        if self.num_trained == self.num_parameters:
            trainable = "all"
        return "  " * self.depth + self.name, self.kind, f"{self.num_parameters:,}", trainable


def _whole_model(model: nn.Module) -> _Module:
    num_frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    total = num_parameters(model)
    kind = "" if layout_of(model) is None else "rank 0's part"
    return _Module(type(model).__name__, kind, 0, total, total - num_frozen)


def _modules(module: nn.Module, *, depth: int, level: int = 1, prefix: str = "") -> Iterator[_Module]:
    """Yield the modules inside `module` down to a depth, parents first."""
    for name, child in module.named_children():
        number = sum(parameter.numel() for parameter in child.parameters())
        if number:
            yield _Module(f"{prefix}{name}", _kind(child), level, number, _num_trained(child))
            if level < depth:
                yield from _modules(child, depth=depth, level=level + 1, prefix=f"{prefix}{name}.")


def _kind(module: nn.Module) -> str:
    """Return the class's name; `4 × Block` for a container of several modules of one class."""
    kinds = [type(child).__name__ for child in module.children()]
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
    if is_container and len(kinds) > 1 and len(set(kinds)) == 1:
        return f"{len(kinds)} × {kinds[0]}"
    return type(module).__name__


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


# The facts below the table


def _facts(setup: RankSetup, trainer: Trainer, datasets: Datasets, sizes: StateSizes) -> Iterator[tuple[str, str]]:
    yield "memory", _memory(setup, sizes)
    yield "data", _data(datasets)
    yield "steps", _steps(setup, trainer)
    yield "processes", _processes(setup)


def _memory(setup: RankSetup, sizes: StateSizes) -> str:
    optimizer = "unknown" if sizes.optimizer is None else format_bytes(sizes.optimizer)
    text = f"weights {format_bytes(sizes.weights)}, gradients {format_bytes(sizes.gradients)}, optimizer {optimizer}"
    if setup.context.world_size > 1:
        text = f"each process: {text}"
    if setup.config.checkpoint.enabled:
        text += f", checkpoint about {format_bytes(sizes.checkpoint)}"
    return text


def _data(datasets: Datasets) -> str:
    streams = streams_of(datasets)
    parts = []
    for name, dataset in datasets.parts.items():
        size = "a stream" if name in streams else f"{len(dataset):,}"
        parts.append(f"{name} {size}")
    text = ", ".join(parts)
    return text if streams else f"{text} samples"


def _steps(setup: RankSetup, trainer: Trainer) -> str:
    plan = setup.plan
    batch = f"global batch {plan.global_batch_size}"
    if plan.world_size * plan.micro_batches > 1:
        factors = f"{plan.global_batch_size // plan.world_size // plan.micro_batches} a forward"
        if plan.micro_batches > 1:
            factors += f" × {plan.micro_batches} accumulated"
        if plan.world_size > 1:
            factors += f" × {plan.world_size} processes"
        batch += f" ({factors})"

    per_epoch = trainer.train_loader.steps_per_epoch
    steps = "an unknown number of steps" if per_epoch is None else format_count(per_epoch, "step")
    text = f"{batch}, {steps} an epoch"
    total = total_steps(setup.config.trainer, steps_per_epoch=per_epoch, start=trainer.start_of_run())
    return text if total is None else f"{text}, {total:,} in total"


def _processes(setup: RankSetup) -> str:
    context = setup.context
    topology = context.topology
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
