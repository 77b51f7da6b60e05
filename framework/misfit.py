"""A model that can't take the data: said with the shapes, where the first batch shows it."""

from __future__ import annotations

import re
import traceback

import torch
from torch import nn

from framework.config.schema import Config
from framework.errors import RunError
from framework.tasks.supervised import describe

# "mat1 and mat2 shapes cannot be multiplied", "Expected 3D (unbatched) or 4D (batched) input to conv2d", "expected
# input[20, 3, 8, 8] to have 1 channels", "mat1 and mat2 must have the same dtype"
_ABOUT_TENSORS = re.compile(r"shape|size|dimension|channels|dtype|scalar type|input type|\b[1-5]D\b", re.IGNORECASE)


def misfit(error: BaseException, model: nn.Module, config: Config) -> RunError | None:
    """Return what to raise for an error that `model` has raised on its first batch; None if it isn't about its input.

    Later the same words may mean something else, so call it only if no step has succeeded.
    """
    is_kind = isinstance(error, (RuntimeError, ValueError, IndexError)) and not isinstance(
        error, torch.OutOfMemoryError
    )
    if not is_kind or not _ABOUT_TENSORS.search(str(error)):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    # torch's Module.__call__, whose arguments have those names; without them there is just the traceback.
    calls = (frame.f_locals for frame, _ in frames if frame.f_locals.get("self") is model)
    call = next((names for names in calls if "args" in names and "kwargs" in names), None)
    if call is None:
        return None
    inputs = "; ".join(describe(value) for value in (*call["args"], *call["kwargs"].values()))
    own = [(frame, line) for frame, line in frames if not str(frame.f_globals.get("__name__")).startswith("torch.")]
    frame, line = own[-1]
    first_line = str(error).partition("\n")[0]
    return RunError(
        f"The model can't take the data: {type(error).__name__} on the first batch: {first_line}\n"
        f"  model: {config.model['_target_']}, at {frame.f_code.co_filename}:{line}\n"
        f"  input: {inputs}\n"
        f"  data:  {config.data.datasets['_target_']}\n"
        "Choose another model or data, or change what one of them takes or gives. The log has the traceback."
    )
