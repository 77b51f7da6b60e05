"""The length of a run: its optimizer steps, those of an epoch, and how often a schedule moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from framework.config.schema import Config, TrainerConfig
from framework.data.batching import BatchPlan, count_windows
from framework.optim.objectives import Objectives


def apply_limit(total: int, limit: int | float | None) -> int:
    """Return how many of `total` batches a limit leaves: an int is a number of them, a float a share."""
    if limit is None:
        return total
    if isinstance(limit, int):
        return min(total, limit)
    if limit == 0 or total == 0:
        return 0
    return max(1, int(total * limit))


def steps_per_epoch(settings: TrainerConfig, plan: BatchPlan, *, size: int | None) -> int | None:
    """Return the optimizer steps of an epoch of `size` samples; None if that isn't known.

    `limit_train_batches` counts each process's batches. A stream (`size` is None) has at most as many.
    """
    limit = settings.limit_train_batches
    accumulated = settings.accumulate_grad_batches
    if size is None:
        return None if limit is None else math.ceil(int(limit) / accumulated)
    steps = count_windows(size, global_batch_size=plan.global_batch_size, drop_last=plan.drop_last)
    batches = steps * accumulated
    return math.ceil(apply_limit(batches, limit) / accumulated)


class Start(NamedTuple):
    """Where a run starts: at 0, or at the checkpoint that it resumes from."""

    epoch: int = 0
    step: int = 0
    # Steps left in the epoch, if the run starts in the middle of one; None at its beginning, or if unknown.
    steps_left: int | None = None


FROM_SCRATCH = Start()


def start_of(progress: Mapping[str, int], *, size: int | None, steps_per_epoch: int | None, plan: BatchPlan) -> Start:
    """Return where a resumed run starts, maybe in the middle of an epoch and with another global batch.

    progress: `epoch`, `step`, and `samples` taken of that epoch. size: samples of an epoch; None for a stream.
    """
    steps_left = None
    if progress["samples"] and steps_per_epoch is not None:
        end = steps_per_epoch * plan.global_batch_size
        if size is not None:
            end = min(size, end)
        left = max(0, end - progress["samples"])
        steps_left = count_windows(left, global_batch_size=plan.global_batch_size, drop_last=plan.drop_last)
    return Start(progress["epoch"], progress["step"], steps_left)


def step_of_epoch_end(epoch: int, *, steps_per_epoch: int, start: Start) -> int:
    """Return the steps done at the end of `epoch`, which mustn't be before the one that the run starts in."""
    first = steps_per_epoch if start.steps_left is None else start.steps_left
    return start.step + first + (epoch - start.epoch) * steps_per_epoch


def total_steps(settings: TrainerConfig, *, steps_per_epoch: int | None, start: Start = FROM_SCRATCH) -> int | None:
    """Return the optimizer steps of the whole run; None if only a callback will end it.

    If the steps of an epoch are unknown, it is `max_steps`, or None. In a resumed run, it is the steps done plus
    those left, counted with this run's steps per epoch.
    """
    epochs = settings.max_epochs
    if epochs is None or steps_per_epoch is None:
        return settings.max_steps
    if epochs <= start.epoch:
        steps_of_epochs = start.step
    else:
        steps_of_epochs = step_of_epoch_end(epochs - 1, steps_per_epoch=steps_per_epoch, start=start)
    if settings.max_steps is None:
        return steps_of_epochs
    return min(steps_of_epochs, settings.max_steps)


def schedule_length(
    config: Config,
    per_epoch: int | None,
    optimizer: str = "",
    *,
    objectives: Objectives | None = None,
    start: Start = FROM_SCRATCH,
) -> int | None:
    """Return how often an optimizer's scheduler moves in the whole run; None if that isn't known.

    per_epoch: steps of an epoch, None if unknown. objectives: of the task, in which the optimizer `optimizer` steps.
    """
    steps = total_steps(config.trainer, steps_per_epoch=per_epoch, start=start)
    if config.scheduler.interval == "step":
        if objectives is None or steps is None:
            return steps
        return objectives.count(optimizer, steps=steps)

    # Counted in epochs.
    if per_epoch is None:
        return config.trainer.max_epochs
    if steps is None:
        return None
    if steps <= start.step:
        return start.epoch
    first_epoch_end = step_of_epoch_end(start.epoch, steps_per_epoch=per_epoch, start=start)
    epochs_after_first = math.ceil((steps - first_epoch_end) / per_epoch)
    return start.epoch + 1 + max(0, epochs_after_first)
