"""The length of a run: its optimizer steps, those of an epoch, and how often a schedule moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from framework.config.schema import Config, TrainerConfig
from framework.data.batching import BatchPlan, count_windows
from framework.data.epochs import EpochSizes, EpochSteps
from framework.optim.objectives import Objectives


def epoch_steps(settings: TrainerConfig, plan: BatchPlan, *, sizes: EpochSizes | None) -> EpochSteps | None:
    """Return the optimizer steps of each epoch; None if they aren't known.

    `limit_train_batches` counts each process's batches. A stream (`sizes` is None) has at most as many.
    """
    limit = settings.limit_train_batches
    if sizes is None and limit is None:
        return None
    return EpochSteps(sizes, plan, limit, settings.accumulate_grad_batches)


class Start(NamedTuple):
    """Where a run starts: at 0, or at the checkpoint that it resumes from."""

    epoch: int = 0
    step: int = 0
    # Steps left in the epoch, if the run starts in the middle of one; None at its beginning, or if unknown.
    steps_left: int | None = None


FROM_SCRATCH = Start()


def nominal_samples(progress: Mapping[str, int]) -> int:
    """Return the samples that are taken of an epoch if each global batch was complete.

    Checkpoints of earlier versions only have the samples that were taken.
    """
    return progress.get("nominal_samples", progress["samples"])


def start_of(progress: Mapping[str, int], *, steps: EpochSteps | None, plan: BatchPlan) -> Start:
    """Return where a resumed run starts, maybe in the middle of an epoch and with another global batch.

    progress: of a checkpoint. steps: of each epoch; None if unknown.
    """
    steps_left = None
    if progress["samples"] and steps is not None:
        left = max(0, steps.samples_of(progress["epoch"]) - nominal_samples(progress))
        steps_left = count_windows(left, global_batch_size=plan.global_batch_size, drop_last=plan.drop_last)
    return Start(progress["epoch"], progress["step"], steps_left)


def step_of_epoch_end(epoch: int, *, steps: EpochSteps, start: Start) -> int:
    """Return the steps done at the end of `epoch`, which mustn't be before the one that the run starts in."""
    first = start.steps_left
    if first is None:
        first = steps.of(start.epoch)
    return start.step + first + steps.between(start.epoch + 1, epoch + 1)


def total_steps(settings: TrainerConfig, *, steps: EpochSteps | None, start: Start = FROM_SCRATCH) -> int | None:
    """Return the optimizer steps of the whole run; None if only a callback will end it.

    If the steps of an epoch are unknown, it is `max_steps`, or None. In a resumed run, it is the steps done plus
    those left, counted with this run's steps of each epoch.
    """
    epochs = settings.max_epochs
    if epochs is None or steps is None:
        return settings.max_steps
    if epochs <= start.epoch:
        steps_of_epochs = start.step
    else:
        steps_of_epochs = step_of_epoch_end(epochs - 1, steps=steps, start=start)
    if settings.max_steps is None:
        return steps_of_epochs
    return min(steps_of_epochs, settings.max_steps)


def schedule_length(
    config: Config,
    steps: EpochSteps | None,
    optimizer: str = "",
    *,
    objectives: Objectives | None = None,
    start: Start = FROM_SCRATCH,
) -> int | None:
    """Return how often an optimizer's scheduler moves in the whole run; None if that isn't known.

    steps: of each epoch, None if unknown. objectives: of the task, in which the optimizer `optimizer` steps.
    """
    total = total_steps(config.trainer, steps=steps, start=start)
    if config.scheduler.interval == "step":
        if objectives is None or total is None:
            return total
        return objectives.count(optimizer, steps=total)

    # Counted in epochs.
    if steps is None:
        return config.trainer.max_epochs
    if total is None:
        return None
    if total <= start.step:
        return start.epoch
    return _epochs_until(total, steps=steps, start=start)


def _epochs_until(total: int, *, steps: EpochSteps, start: Start) -> int:
    """Return the epochs that are begun in a run of `total` steps."""
    epochs = start.epoch + 1
    done = step_of_epoch_end(start.epoch, steps=steps, start=start)
    if steps.constant is not None:
        return epochs + max(0, math.ceil((total - done) / steps.constant))
    while done < total:
        done += steps.of(epochs)
        epochs += 1
    return epochs
