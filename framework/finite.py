"""Numbers that are no longer finite: looked for before anything is saved, and told with the step they came in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.tensors import whole
from framework.errors import RunError
from framework.meter import Meter


def check_finite(parameters: Sequence[nn.Parameter], meter: Meter, *, step: int, epoch: int, context: Context) -> None:
    """Raise RunError where a loss was NaN or infinite on any rank, or a step made a weight so.

    Every rank must call it; waits for the device.
    """
    bad = not math.isfinite(float(whole(nn.utils.get_total_norm(parameters))))
    found = gather_to_all((meter.first_nonfinite(), bad), context)
    steps = [step for step, _ in found if step is not None]
    if steps:
        raise bad_loss("not finite", step=min(steps), epoch=epoch)
    if any(bad for _, bad in found):
        raise RunError(
            f"The weights are no longer finite after step {step}, though the loss was.\n"
            "Nothing was saved since. Lower optimizer.lr, set trainer.gradient_clip_val, or look at the gradients."
        )


def bad_loss(value: object, *, step: int | None, epoch: int) -> RunError:
    """The error for a loss that is `value` since `step`."""
    return RunError(
        f"The training loss is {value} since step {step} (epoch {epoch}).\n"
        "Nothing was saved after it. Lower optimizer.lr, set trainer.gradient_clip_val, or look at that batch."
    )
