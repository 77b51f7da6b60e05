"""Find the hook of a callback, logger or task that a rank was in, as far as its stack shows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from framework.types import Callback, Logger, TaskHooks

_PACKAGE = re.escape(str(Path(__file__).parents[1]))
# Files that call hooks.
_CALLERS = re.compile(rf"{_PACKAGE}/(training/\w+|engine/train|loggers/media|tasks/lightning/\w+)\.py")
# Files with what these call besides: the rest of the framework, and torch.
_NO_HOOKS = re.compile(rf"{_PACKAGE}/(?!callbacks/|loggers/|tasks/)|.*/site-packages/torch/")


class Called(NamedTuple):
    """A function of a stack: its name, and the file that has it."""

    name: str
    file: str


def innermost_hook(stack: Sequence[Called]) -> int | None:
    """Return the position of the innermost hook in a stack, whose innermost function is the first; None without one."""
    for position, (called, caller) in enumerate(pairwise(stack)):
        is_called_as_hook = _CALLERS.fullmatch(caller.file) and not _NO_HOOKS.match(called.file)
        if is_called_as_hook and _is_name_of_hook(called.name):
            return position
    return None


def _is_name_of_hook(name: str) -> bool:
    # Those of a LightningModule have other names, which begin with `on_`, too.
    return name.startswith("on_") or any(name in vars(base) for base in (Callback, Logger, TaskHooks))


def hook_of_traceback(traceback: TracebackType | None) -> str | None:
    """Return the hook that an exception was raised in, such as `WeightAverage.on_train_epoch_end`; None without one."""
    frames: list[FrameType] = []
    while traceback is not None:
        frames.insert(0, traceback.tb_frame)
        traceback = traceback.tb_next
    position = innermost_hook([Called(frame.f_code.co_name, frame.f_code.co_filename) for frame in frames])
    if position is None:
        return None
    return _described(frames[position])


def _described(frame: FrameType) -> str:
    """Return the function of a frame, after the class of its first argument, which is `self`."""
    code = frame.f_code
    if not code.co_argcount:
        return code.co_name
    self_name = code.co_varnames[0]
    if self_name not in frame.f_locals:
        # The function has deleted it, or an inner function has it in a closure.
        return code.co_name
    return f"{type(frame.f_locals[self_name]).__name__}.{code.co_name}"
