"""`python -m framework`: start the fork server, which imports torch while this process composes the configuration."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from framework.config.renamed import present_override
from framework.errors import EXIT_INTERRUPTED, EXIT_STOPPED, FrameworkError, StoppedBySignalError
from framework.system.output import ReaderGoneError, only_answers_on_stdout, tolerant_output
from framework.system.shown_text import shown
from framework.system.signals import interrupting

if TYPE_CHECKING:
    from framework.launch.external_ranks import ExternalRanks
    from framework.launch.fork_server import ForkServer

# What a shell reports of a command that SIGPIPE ended.
EXIT_BROKEN_PIPE = 141

# With this, the job runs in the command's own process.
_IN_PROCESS = "launcher=in_process"
# With these, no job runs.
_ONLY_ANSWER = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--shell-completion",
    "-sc",
)


def main() -> int:
    """Run the command and return its exit status.

    0: success; 1: a failed run; 2: a wrong request; 75: stopped on request; 130: interrupted; 141: nobody reads the
    answer.
    """
    try:
        with tolerant_output():
            status = _command()
    finally:
        _discard_refused()
    # This was a rank, or a client of the nodes' store, for which a thread may still be waiting.
    if "torch" in sys.modules:
        from framework.launch.child import leave

        leave(status)
    return status


def _command() -> int:
    """Run the command. Until it has ranks that can save, a scheduler's signal ends it: nothing is lost by that."""
    try:
        with interrupting():
            return _run_command()
    except StoppedBySignalError as stop:
        print(f"Stopped by {stop} before anything was started", file=sys.stderr, flush=True)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ReaderGoneError:
        return EXIT_BROKEN_PIPE


def _run_command() -> int:
    from framework.launch.cluster_environment import typed_value, without_secret

    if {"-sc", "--shell-completion"} & set(sys.argv):
        return _complete(sys.argv[1:])
    arguments = without_secret(sys.argv[1:], os.environ)
    sys.argv[1:] = arguments
    if typed_value(arguments, "format") == "json":
        # Before any other process starts.
        with only_answers_on_stdout():
            return _run(arguments)
    return _run(arguments)


def _complete(arguments: list[str]) -> int:
    """Answer a shell's completion, which imports as little as it can."""
    from framework.command.completion import completion_answer
    from framework.system.output import answer

    try:
        answer(completion_answer(arguments, os.environ.get("COMP_LINE", "")))
    except FrameworkError as error:
        print(shown(str(error)), file=sys.stderr)
        return error.exit_status
    return 0


def _run(arguments: list[str]) -> int:
    status = _external(arguments)
    if status is not None:
        return status
    if not _needs_fork_server(arguments):
        return _answer(arguments)
    from framework.launch.fork_server import PRELOAD, OwnForkServer

    with closing(OwnForkServer(PRELOAD)) as fork_server:
        return _answer(arguments, fork_server=fork_server)


def _answer(
    arguments: list[str], *, fork_server: ForkServer | None = None, external_ranks: ExternalRanks | None = None
) -> int:
    # Imports Hydra, while the fork server imports torch.
    from framework.command.compose import main as run_command

    return run_command(arguments, fork_server=fork_server, external_ranks=external_ranks)


def _external(arguments: list[str]) -> int | None:
    """Run this process's part if torchrun, srun or Kubernetes started it as a rank, else return None."""
    from framework.launch.cluster_environment import ReportedByRankZeroError, chooses_own_ranks, detect, typed_value

    if chooses_own_ranks(arguments):
        return None
    try:
        cluster = detect(os.environ, endpoint=typed_value(arguments, "topology.rdzv_endpoint"))
    except FrameworkError as error:
        if not isinstance(error, ReportedByRankZeroError):
            print(shown(str(error)), file=sys.stderr)
        return error.exit_status
    if cluster is None:
        return None
    from framework.launch.external import run_external

    return run_external(
        cluster,
        arguments,
        command=lambda external_ranks: _answer(external_ranks.arguments, external_ranks=external_ranks),
    )


def _needs_fork_server(arguments: list[str]) -> bool:
    """Return True if the command may start processes with torch, guessed from the arguments before they are parsed."""
    from framework.config.jobs import JOBS

    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in _ONLY_ANSWER or present_override(argument) == _IN_PROCESS:
            return False
        if key == "job" and value in JOBS and not JOBS[value].needs_torch:
            return False
    return True


def _discard_refused() -> None:
    """Discard what stdout and stderr still refuse, which the interpreter would report when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
