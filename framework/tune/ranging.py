"""The learning-rate range test on one rank: real steps of the whole run, with a rate that grows from step to step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import islice

from framework.config.schema import TuneConfig
from framework.meter import LOSS
from framework.trainer import Trainer
from framework.tune.suggesting import Curve
from framework.tune.trying import endless


def range_test(trainer: Trainer, settings: TuneConfig, *, note: Callable[[int], None]) -> Curve:
    """Train `settings.num_training` steps with rates from `min_lr` to `max_lr`, evenly apart by their logarithms.

    The rate is that of the optimizer's first group; others keep their ratio to it. Ends before where the loss isn't
    finite any more, or has risen beyond `early_stop_threshold`. The loss is the mean over the global batch, so that
    every rank knows the same and all end together. Every rank must call it. note: called with the number of each step.
    Leaves the trainer trained.
    """
    groups = trainer.parts.optimizer.param_groups
    rates = [float(group["lr"]) for group in groups]
    ratios = [rate / rates[0] if rates[0] else 1.0 for rate in rates]
    curve = Curve(threshold=settings.early_stop_threshold)
    last = settings.num_training - 1
    with closing(endless(trainer.train_loader)) as windows:
        for number, window in enumerate(islice(windows, settings.num_training)):
            done = number / last
            lr = settings.min_lr ** (1 - done) * settings.max_lr**done  # each factor is finite, whatever their ratio
            for group, ratio in zip(groups, ratios, strict=True):
                group["lr"] = lr * ratio
            trainer.train_step(window)
            note(number + 1)
            if not curve.add(lr, trainer.read_means()[LOSS]):
                break
    return curve
