"""The exceptions of the framework.

An error says what happened, which value was given, what is allowed and what to do. Those below print as a few lines
without a traceback; any other exception is unexpected and keeps its traceback. The class says who must act:
a `RequestError` is for the user, who has to type something else; a `RunError` happened to a correct request.
"""

from __future__ import annotations

import traceback

EXIT_RUN_FAILED = 1
EXIT_WRONG_REQUEST = 2
# Stopped on request, with a checkpoint to resume from: EX_TEMPFAIL of sysexits.h.
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130


class FrameworkError(Exception):
    """Base of every error that the framework raises on purpose."""

    # Of the command.
    exit_status = EXIT_RUN_FAILED
    # A restart would fail with the same error, so there is none.
    is_final = False


class RequestError(FrameworkError):
    """The request is wrong. Nothing was started."""

    exit_status = EXIT_WRONG_REQUEST
    is_final = True


class ConfigError(RequestError):
    """A key, value or combination in the configuration is wrong."""


class TopologyError(RequestError):
    """Nodes, GPUs and processes don't fit together, or don't exist."""


class TargetError(RequestError):
    """A `_target_` node names something that can't be imported, or gives it keywords it doesn't take."""


class DataError(RequestError):
    """The data is missing, damaged, empty or too small for the request."""


class CheckpointError(RequestError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class RunError(FrameworkError):
    """A correct request failed while it ran."""


class NotFiniteError(RunError):
    """A loss or weight is NaN or infinite."""


class PreflightError(RunError):
    """A check before training failed. Nothing was trained."""

    is_final = True


class DiskError(RunError):
    """A file could not be written to the disk."""


class LostRunDirError(RunError):
    """The run directory was deleted or moved while the run was using it. Nothing can be saved or resumed there."""

    is_final = True


class LaunchError(RunError):
    """The processes of a run could not be started or were lost."""


class StoppedBySignalError(KeyboardInterrupt):
    """A signal other than Ctrl-C ends the command where nothing is lost: what is left is done by resuming.

    It is a KeyboardInterrupt, which no handler of errors catches.
    """

    exit_status = EXIT_STOPPED


def describe_error(error: BaseException, *, lines: int = 1) -> str:
    """Return its class and the first `lines` non-empty lines of its text."""
    name = type(error).__name__
    text = [line for line in str(error).splitlines() if line.strip()]
    if not text:
        return name
    return "\n".join([f"{name}: {text[0]}", *text[1:lines]])


def raised_at(error: BaseException) -> str:
    """Return the line that raised it, the last one outside of torch: the one to change."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not str(frame.f_globals.get("__name__")).startswith("torch."):
            frames.append((frame, line))
    last = traceback.StackSummary.extract(frames)[-1]
    return f"  {last.filename}, line {last.lineno}, in {last.name}: {last.line}"
