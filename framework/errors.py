"""The exceptions of the framework.

An error says what happened, which value was given, what is allowed and what to do. Those below print as a few lines
without a traceback; any other exception is unexpected and keeps its traceback. The class says who must act:
a `RequestError` is mended by typing something else, a `RunError` happened to a request that was fine.
"""

EXIT_RUN_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_STOPPED = 75  # on request, with a checkpoint to go on from: EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED = 130


class FrameworkError(Exception):
    """Base of every error the framework raises on purpose; `exit_status` is what the command ends with.

    is_final: what is started anew would fail alike, so it isn't.
    """

    exit_status = EXIT_RUN_FAILED
    is_final = False


class RequestError(FrameworkError):
    """What was asked for can't be done as asked. Nothing was started."""

    exit_status = EXIT_WRONG_REQUEST
    is_final = True


class ConfigError(RequestError):
    """A key, value or combination in the configuration is wrong."""


class TopologyError(RequestError):
    """Nodes, GPUs and processes don't fit together, or aren't there."""


class TargetError(RequestError):
    """A `_target_` node names something that can't be imported, or gives it keywords it doesn't take."""


class DataError(RequestError):
    """The data is missing, damaged, empty or too small for what was asked."""


class CheckpointError(RequestError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class RunError(FrameworkError):
    """A run that was asked for correctly failed."""


class PreflightError(RunError):
    """What was asked to be checked before training isn't as it should be. Nothing was trained."""

    is_final = True


class DiskError(RunError):
    """The disk refused what was to be written."""


class LaunchError(RunError):
    """The processes of a run could not be started or were lost."""
