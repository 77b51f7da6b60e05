"""The learning-rate range test: real steps with a growing rate, the smoothed loss, a suggestion, and a plot.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186, section 3.3.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from framework.config.schema import TuneConfig
from framework.jobs.tune.batch_size import train_steps
from framework.training.meter import LOSS
from framework.training.trainer import Trainer

_SMOOTHING = 0.9
_SKIPPED = 10  # first steps, whose mean is of few losses
_LEAST_FALL = 0.05  # as a share of where the loss falls from
_TIMES_NOISE = 2.0  # of single losses: a flat smoothed curve wanders by about one
_BEGUN = 0.1  # the share of its fall after which the loss counts as falling


def range_test(
    trainer: Trainer, settings: TuneConfig, *, on_step: Callable[[int], None]
) -> Iterator[tuple[float, float]]:
    """Train `settings.num_training` steps with rates from `min_lr` to `max_lr`; yield each step's rate and loss.

    The rate, which grows by a constant factor, is that of the optimizer's first group; the others keep their ratio to
    it. The loss is the mean over the global batch, the same on all ranks. Every rank must iterate. The weights change.
    """
    groups = trainer.state.optimizer.param_groups
    first = float(groups[0]["lr"])
    ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]
    steps = train_steps(trainer, trainer.train_loader, settings.num_training)
    bounds = (math.log10(settings.min_lr), math.log10(settings.max_lr))
    rates: list[float] = torch.logspace(*bounds, settings.num_training, dtype=torch.float64).tolist()
    for step, lr in enumerate(rates, start=1):
        for group, ratio in zip(groups, ratios, strict=True):
            group["lr"] = lr * ratio
        next(steps)
        on_step(step)
        yield lr, trainer.read_means()[LOSS]


def assess(losses: Iterable[tuple[float, float]], *, threshold: float | None) -> dict[str, Any]:
    """Return points, suggestion and why the test ended early, as tune.json has them.

    Args:
        losses: rates and losses; none is taken after the test has diverged.
        threshold: the test has diverged if the smoothed loss exceeds its minimum by this factor; None: never.
    """
    points: list[dict[str, float]] = []
    stopped = None
    mean = 0.0
    lowest = math.inf
    for lr, loss in losses:
        if not math.isfinite(loss):
            stopped = f"the loss was {loss} at {lr:.2g}"
            break
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smoothed = mean / (1 - _SMOOTHING ** (len(points) + 1))  # without the bias of the first mean, 0
        points.append({"lr": lr, "loss": loss, "smoothed": smoothed})
        lowest = min(lowest, smoothed)
        if threshold is not None and smoothed > lowest + (threshold - 1) * abs(lowest):  # losses may be negative
            stopped = f"the loss had risen to {smoothed:.3g} at {lr:.2g}, from {lowest:.3g}"
            break
    return {"stopped": stopped, "suggestion": suggest(points), "points": points}


def suggest(points: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the rate at which the smoothed loss falls fastest, between where the fall `begins` and the `minimum`.

    None if it falls by no more than noise. docs/tune.md compares this rule with others.
    """
    points = points[_SKIPPED:]
    if len(points) < 3:
        return None
    smoothed, losses = (torch.tensor([p[key] for p in points], dtype=torch.float64) for key in ("smoothed", "loss"))
    lowest = int(smoothed.argmin())
    high = smoothed[: lowest + 1].max()
    fall = high - smoothed[lowest]
    if fall <= _LEAST_FALL * abs(high):
        return None
    # The standard deviation of single losses, of which a fall of a few steps doesn't change the median difference.
    # 0.6745 is the median of a normal distribution's absolute values.
    noise = losses[: lowest + 1].diff().abs().median() / (0.6745 * math.sqrt(2))
    if fall <= _TIMES_NOISE * noise:
        return None
    begins = int((smoothed[:lowest] >= high - _BEGUN * fall).nonzero()[-1])
    steepest = begins + int(torch.gradient(smoothed)[0][begins : lowest + 1].argmin())
    return {name: points[i]["lr"] for name, i in (("lr", steepest), ("begins", begins), ("minimum", lowest))}


def plot(found: Mapping[str, Any], *, title: str) -> str:
    """Return the loss over the learning rate as SVG. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure  # pyplot would choose a backend and keep global state

    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    lrs, losses, smoothed = ([point[key] for point in found["points"]] for key in ("lr", "loss", "smoothed"))
    axes.plot(lrs, losses, ".", color="0.7")
    axes.plot(lrs, smoothed, linewidth=2)
    best = found["suggestion"]
    if best is not None:
        for label, lr, color in (
            ("suggested", best["lr"], "C3"),
            ("falls from", best["begins"], "C2"),
            ("lowest at", best["minimum"], "0.5"),
            ("a tenth of that", best["minimum"] / 10, "0.7"),
        ):
            axes.axvline(lr, color=color, linestyle="--", label=f"{label} {lr:.2g}")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        # However far the loss rises after the fall, the fall must be visible.
        until = smoothed.index(min(smoothed)) + 1
        low = min(losses[:until])
        high = max(smoothed[:until])
        axes.set_ylim(low - 0.12 * (high - low), high + 0.25 * (high - low))
    image = io.StringIO()
    figure.savefig(image, format="svg")
    return image.getvalue()
