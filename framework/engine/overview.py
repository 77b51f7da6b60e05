"""The table before the first step, which rank 0 prints and logs: the model and its memory, the data, the processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from framework.config.written import written_config
from framework.engine.data_checks import streams_of
from framework.engine.module_table import module_table
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
    # `show` writes to the log, too. What it has written isn't repeated.
    if not is_shown or full_table != short_table:
        logger.info("the model and its training:\n%s\n%s", full_table, facts)

    _say_where_it_continues(setup, trainer, is_shown=is_shown)
    summary = Text(f"{full_table}\n{facts}")
    trainer.logbook.log_values({"summary": summary, "config": Text(written_config(setup.run_dir))})


def _say_where_it_continues(setup: RankSetup, trainer: Trainer, *, is_shown: bool) -> None:
    """Show and log a restart with its cause; show where a resumed run continues."""
    progress = trainer.progress
    position = f"after step {progress.step:,}, in epoch {progress.epoch}"
    if setup.attempt > 0:
        begins = "starting from scratch"
        if progress.step > 0:
            begins = f"resuming {position}"
        text = f"Restart {setup.attempt}: {begins}\nCause: {_cause_of_restart(setup)}"
        show(text)
        trainer.logbook.log_values({"restart": Text(text)})
        trainer.logbook.log_values({"restart/attempt": float(setup.attempt)})
    elif progress.step > 0 and is_shown:
        show(f"Resuming {position}")


# The facts below the table


def _facts(setup: RankSetup, trainer: Trainer, datasets: Datasets, sizes: StateSizes) -> Iterator[tuple[str, str]]:
    yield "memory", _memory(setup, sizes)
    yield "data", _data(datasets)
    yield "steps", _steps(setup, trainer)
    yield "processes", _processes(setup)


def _memory(setup: RankSetup, sizes: StateSizes) -> str:
    optimizer = "unknown"
    if sizes.optimizer is not None:
        optimizer = format_bytes(sizes.optimizer)
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
    if streams:
        return text
    return f"{text} samples"


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
    lists = trainer.train_loader.lists
    if lists is not None:
        batch = f"global batches of {lists.name}"

    steps = trainer.train_loader.steps
    shown = "an unknown number of steps"
    if steps is not None:
        shown = "different numbers of steps"
        if steps.constant is not None:
            shown = format_count(steps.constant, "step")
    text = f"{batch}, {shown} an epoch"
    total = total_steps(setup.config.trainer, steps=steps, start=trainer.start_of_run())
    if total is not None:
        text += f", {total:,} in total"
    return text


def _processes(setup: RankSetup) -> str:
    context = setup.context
    topology = context.topology
    devices = ", ".join(dict.fromkeys(map(str, context.devices)))
    if context.device.type == "cuda":
        devices += f" ({torch.cuda.get_device_name(context.device)})"
    number = format_count(context.world_size, "process", "processes")
    if topology.nnodes > 1:
        number += f" on {topology.nnodes} nodes"
    strategy = type(setup.strategy).__name__
    return f"{number}, {devices}, {context.backend}, {strategy}, {setup.config.trainer.precision}"


def _cause_of_restart(setup: RankSetup) -> str:
    file = setup.run_dir.failure_of(node=0, attempt=setup.attempt - 1, is_last=False)
    plain = read_object(file)
    if plain is None:
        return f"not known: there is no {file.name}"
    first = FailureReport.from_plain(plain).first
    return f"rank {first.rank}: {first.cause}"
