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
from framework.jobs.tune.steps import train_steps
from framework.training.meter import LOSS
from framework.training.trainer import Trainer

_SMOOTHING = 0.9
# The first steps aren't assessed, since their smoothed loss is a mean of few losses.
_SKIPPED = 10
# The least fall that counts, as a share of where the loss falls from.
_LEAST_FALL = 0.05
# The least fall that counts, in standard deviations of single losses: a flat smoothed curve wanders by about one.
_TIMES_NOISE = 2.0
# The share of its fall after which the loss counts as falling.
_BEGUN = 0.1


def range_test(
    trainer: Trainer, settings: TuneConfig, *, on_step: Callable[[int], None]
) -> Iterator[tuple[float, float]]:
    """Train `settings.num_training` steps with rates from `min_lr` to `max_lr`; yield each step's rate and loss.

    The rate, which grows by a constant factor, is that of the optimizer's first group; the others keep their ratio to
    it. The loss is the mean over the global batch, the same on all ranks. Every rank must iterate. The weights change.
    """
    groups = trainer.state.optimizer.param_groups
    first_lr = float(groups[0]["lr"])
    ratios = [1.0] * len(groups)
    if first_lr != 0.0:
        ratios = [float(group["lr"]) / first_lr for group in groups]
    rates = torch.logspace(
        math.log10(settings.min_lr), math.log10(settings.max_lr), settings.num_training, dtype=torch.float64
    ).tolist()
    steps = train_steps(trainer, trainer.train_loader, settings.num_training)
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
        # The mean began at 0; this removes that bias, as Adam does.
        smoothed = mean / (1 - _SMOOTHING ** (len(points) + 1))
        points.append({"lr": lr, "loss": loss, "smoothed": smoothed})
        lowest = min(lowest, smoothed)
        # Losses may be negative.
        if threshold is not None and smoothed > lowest + (threshold - 1) * abs(lowest):
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
    losses = torch.tensor([point["loss"] for point in points], dtype=torch.float64)
    smoothed = torch.tensor([point["smoothed"] for point in points], dtype=torch.float64)
    lowest = int(smoothed.argmin())
    high = smoothed[: lowest + 1].max()
    fall = high - smoothed[lowest]
    if fall <= _LEAST_FALL * abs(high):
        return None

    # The standard deviation of single losses, estimated from the median difference of neighbours: a fall within a few
    # steps hardly changes a median. A difference varies by the factor sqrt(2) more than a loss, and 0.6745 is the
    # median of a standard normal distribution's absolute values.
    noise = losses[: lowest + 1].diff().abs().median() / (0.6745 * math.sqrt(2))
    if fall <= _TIMES_NOISE * noise:
        return None

    # The last step at which the loss had fallen by no more than a share `_BEGUN` of the whole fall.
    begins = int((smoothed[:lowest] >= high - _BEGUN * fall).nonzero()[-1])
    steepest = begins + int(torch.gradient(smoothed)[0][begins : lowest + 1].argmin())
    return {"lr": points[steepest]["lr"], "begins": points[begins]["lr"], "minimum": points[lowest]["lr"]}


def plot(assessed: Mapping[str, Any], *, title: str) -> str:
    """Return the loss over the learning rate as SVG. Raises ModuleNotFoundError without matplotlib.

    assessed: what `assess` has returned.
    """
    # pyplot would choose a backend and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    lrs = [point["lr"] for point in assessed["points"]]
    losses = [point["loss"] for point in assessed["points"]]
    smoothed = [point["smoothed"] for point in assessed["points"]]
    axes.plot(lrs, losses, ".", color="0.7")
    axes.plot(lrs, smoothed, linewidth=2)

    suggestion = assessed["suggestion"]
    if suggestion is not None:
        minimum = suggestion["minimum"]
        marks = [
            ("suggested", suggestion["lr"], "C3"),
            ("falls from", suggestion["begins"], "C2"),
            ("lowest at", minimum, "0.5"),
            ("a tenth of that", minimum / 10, "0.7"),
        ]
        for label, lr, color in marks:
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
