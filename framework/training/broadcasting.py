"""Refuse outputs and targets of different shapes, which torch's losses broadcast with no more than a warning."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from framework.errors import DataError

# Of mse_loss, l1_loss, smooth_l1_loss and huber_loss in torch.nn.functional. A single target for all is allowed.
_WARNING = r"Using a target size \(torch\.Size\(\[(?!(1(, 1)*)?\]\))"
_TORCH = Path(torch.__file__).parent


@contextmanager
def refused_broadcasting() -> Iterator[None]:
    """Raise DataError where torch only warns that a loss broadcasts. Costs nothing in a step.

    Enter it after the user's code is imported, since that may change the warning filters.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_WARNING, category=UserWarning)
        try:
            yield
        except UserWarning as warning:
            if re.match(_WARNING, str(warning)) is None:
                raise
            raise DataError(_described(warning)) from warning


def _described(warning: UserWarning) -> str:
    frames = traceback.extract_tb(warning.__traceback__)
    # The user's line is the last before torch's.
    calls = [frame for frame in frames if _TORCH not in Path(frame.filename).parents]
    place = ""
    if calls:
        call = calls[-1]
        place = f"  {call.filename}, line {call.lineno}, in {call.name}: {call.line}\n"
    target, output, *_ = re.findall(r"torch\.Size\(\[([\d, ]*)\]\)", str(warning))
    return (
        f"A loss got an output of shape ({output}) and a target of shape ({target}). They must be the same; "
        f"broadcasting would compare wrong pairs.\n{place}Give both the same shape, by output.squeeze(-1) or "
        "target.unsqueeze(-1)."
    )
