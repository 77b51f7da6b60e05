"""Evaluation: every sample once, whatever the number of ranks, and one reduction at the end."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from framework.distributed.context import Context
from framework.meter import Meter
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

    `model` is the unwrapped module: its forward has no collectives, so ranks may have different numbers of batches.
    Afterwards every module is in the mode it was in.
    """
    meter = Meter()
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.inference_mode():
        for micro in batches:
            with precision.autocast():
                output = task.validation_step(model, precision.convert_batch(micro.batch))
            meter.add(output)
    for module in training:
        module.training = True  # each by itself: a part that was frozen stays so
    values, _ = meter.reduce(context)
    return {f"{prefix}/{name}": value for name, value in values.items()}
