"""Evaluation: every sample once, whatever the number of ranks, and one reduction at the end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from framework.data.loader import EvalLoader
from framework.data.stream_loader import StreamEvalLoader
from framework.distributed.context import Context
from framework.distributed.stages import gives_output
from framework.distributed.tensors import is_model_spread
from framework.meter import Meter, check_output
from framework.precision import PrecisionPlugin
from framework.types import MicroBatch, Task


def evaluate(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    task: Task,
    precision: PrecisionPlugin,
    context: Context,
    prefix: str,
) -> dict[str, float]:
    """Metrics over all ranks' batches, named `prefix/name`. Every rank must call it.

    `model` is the unwrapped module: where its forward has no collectives, ranks may have different numbers of batches.
    A batch of `num_samples` 0 is a stand-in, whose results are left out, and so are those of a rank that hasn't the
    model's output. Afterwards every module is in the mode it was in.
    """
    meter = _run(model, batches, task=task, precision=precision)
    values, _ = meter.reduce(context)
    return {f"{prefix}/{name}": value for name, value in values.items()}


def sanity_check(
    model: nn.Module,
    loader: EvalLoader | StreamEvalLoader,
    *,
    num_batches: int,
    task: Task,
    precision: PrecisionPlugin,
    context: Context,
) -> list[str]:
    """Evaluate each rank's first batches as `evaluate` does, and return the metrics' names. Every rank must call it."""
    meter = _run(model, loader.first(num_batches), task=task, precision=precision)
    meter.reduce(context)
    return meter.names


def _run(model: nn.Module, batches: Iterable[MicroBatch], *, task: Task, precision: PrecisionPlugin) -> Meter:
    """Return what the task computed for these batches, in evaluation mode and without gradients."""
    meter, counts = Meter(), gives_output(model)
    training = [module for module in model.modules() if module.training]
    model.eval()
    with _without_gradients(model):
        for position, micro in enumerate(batches):
            with precision.autocast():
                output = task.validation_step(model, precision.convert_batch(micro.batch))
            if position == 0:
                check_output(output, task, "validation_step")
            if micro.num_samples and counts:
                # Cloned because the next batch may overwrite what a compiled model returned.
                meter.add(output._replace(loss=output.loss.clone()))
    for module in training:
        module.training = True  # each by itself: a part that was frozen stays so
    return meter


def _without_gradients(model: nn.Module) -> AbstractContextManager[None]:
    # What is gathered is kept for the next step, and memory made in inference mode can't be trained on.
    return torch.no_grad() if is_model_spread(model) else torch.inference_mode()
