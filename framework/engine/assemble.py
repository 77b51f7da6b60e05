"""Assemble what every job on a model needs: the model, the task and the precision. No other module does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from framework.checkpoint import find
from framework.config.schema import Config
from framework.distributed.context import Context
from framework.distributed.seed import seed_everything
from framework.engine.builders.adapters import add_adapters
from framework.engine.builders.model import build_model, build_task
from framework.engine.builders.task_parameters import NAME, add_task_parameters
from framework.engine.weights import is_partial, load_for_task, load_initial_weights, load_model
from framework.errors import FrameworkError, TargetError, describe_error, raised_at
from framework.optim.precision import PrecisionPlugin
from framework.types import Task


@dataclass(frozen=True)
class Assembled:
    """A model that no strategy has wrapped yet, and what computes with it."""

    # It holds what the task has added to it, is converted to the formats of `precision`, and has its adapters.
    model: nn.Module
    task: Task
    # The model has parameters of the task; see `add_task_parameters`.
    trains_task: bool
    precision: PrecisionPlugin
    # The checkpoint whose weights the model has; None if they are those it was built with.
    checkpoint: Path | None
    # What was loaded of `init_from`, for the log; None if it wasn't loaded here.
    initial_weights: str | None


def assemble(
    config: Config,
    context: Context,
    *,
    weights: Path | None = None,
    num_stages: int | None = None,
    loads_initial_weights: bool = False,
) -> Assembled:
    """Seed, build the model, the task and the precision, and load weights. Every rank must call it if it loads any.

    Args:
        config: the requested one, before `trainer.fast_dev_run` is applied. A task that takes `config` gets it.
        context: the model gets its devices. On the meta device the model has no values, as job=plan needs it.
        weights: the run or checkpoint to load the model's weights from; None to keep those it was built with.
        num_stages: how many stages the strategy will split the model into. The model then stays on the CPU.
        loads_initial_weights: load those of `init_from`, before adapters are added. If `weights` is a checkpoint of
            what was trained only, this is done anyway.

    Raises:
        FrameworkError: the configuration asks for something that can't be built.
        CheckpointError: the checkpoint is missing, damaged or of another model.
    """
    settings = config.trainer
    precision = PrecisionPlugin(settings.precision, device=context.device, channels_last=settings.channels_last)

    # Every rank draws the same numbers, so replicas start equal even if the strategy doesn't make them so. Frozen
    # weights that checkpoints leave out are drawn again.
    seed_everything(config.seed, rank=0)
    if context.device.type == "meta":
        model = _build_on_meta(config, context, num_stages=num_stages)
    else:
        model = build_model(config.model, context=context, num_stages=num_stages)
        load_for_task(model, config)
    # The task may add to the model, so it comes before the model's formats and weights.
    task = build_task(config.task, model=model, config=config, context=context)
    trains_task = add_task_parameters(model, task, context=context)
    model = precision.convert_model(model)
    task = precision.convert_task(task, model=model)

    if weights is not None and config.init_from is not None:
        loads_initial_weights = is_partial(find(weights))
    initial_weights = None
    if loads_initial_weights and config.init_from is not None:
        initial_weights = load_initial_weights(model, config, context=context)
    if config.peft is not None:
        task_parameters = [*model.get_submodule(NAME).parameters()] if trains_task else []
        model = add_adapters(model, config.peft, place=context.device, trained_too=task_parameters)

    checkpoint = None
    if weights is not None:
        checkpoint = load_model(model, weights, context=context)
    return Assembled(model, task, trains_task, precision, checkpoint, initial_weights)


def _build_on_meta(config: Config, context: Context, *, num_stages: int | None) -> nn.Module:
    """Return the model without values. Raises TargetError if its code needs some."""
    try:
        with torch.device("meta"):
            return build_model(config.model, context=context, num_stages=num_stages)
    except FrameworkError:
        raise
    except Exception as error:
        # The user's class may raise anything.
        raise TargetError(
            f"model: {config.model['_target_']} can't be built on the meta device, where tensors have no values.\n"
            f"{describe_error(error)}\n{raised_at(error)}\n"
            "Build it without reading values: no .item(), no .tolist(), no generator; from_config, not from_pretrained."
        ) from error
