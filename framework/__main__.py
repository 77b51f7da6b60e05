"""`python -m framework`: start the fork server, which imports torch while this process composes the configuration."""

from __future__ import annotations

import os
import select
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from framework.config.renamed import present_override
from framework.errors import EXIT_INTERRUPTED, FrameworkError
from framework.system.shown_text import shown

if TYPE_CHECKING:
    from framework.launch.fork_server import ForkServer
    from framework.launch.handshake import ExternalRanks

EXIT_BROKEN_PIPE = 141  # what a shell reports of a command that SIGPIPE ended

_WITHOUT_RANKS = {"launcher=in_process", "job=runs", "job=compare", "job=report"}
_ONLY_ANSWER = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main() -> int:
    """Run the command and return its exit status.

    0: success; 1: a failed run; 2: a wrong request; 75: stopped on request; 130: interrupted; 141: broken pipe.
    """
    _open_missing_streams()
    try:
        status = _command()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _silence_broken_streams():
            raise
        status = EXIT_BROKEN_PIPE
    # this was a rank, or a client of the nodes' store, for which a thread may still be waiting
    if "torch" in sys.modules:
        from framework.launch.child import leave

        leave(status)
    return status


def _command() -> int:
    from framework.launch.environment import without_secret

    arguments = sys.argv[1:] = without_secret(sys.argv[1:], os.environ)
    try:
        status = _external(arguments)
        if status is not None:
            return status
        if not _starts_ranks(arguments):
            return _answer(arguments)
        from framework.launch.fork_server import PRELOAD, ForkServer

        with closing(ForkServer(PRELOAD)) as fork_server:
            return _answer(arguments, fork_server=fork_server)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _answer(
    arguments: list[str], *, fork_server: ForkServer | None = None, external_ranks: ExternalRanks | None = None
) -> int:
    from framework.command.compose import main as cli_main  # imports Hydra, while the fork server imports torch

    return cli_main(arguments, fork_server=fork_server, external_ranks=external_ranks)


def _external(arguments: list[str]) -> int | None:
    """Run this process's part if torchrun, srun or Kubernetes started it as a rank, else return None."""
    from framework.launch.environment import ReportedByRankZeroError, chooses_own_ranks, detect, typed_value

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


def _starts_ranks(arguments: list[str]) -> bool:
    """Return True if the command may start ranks, guessed from the arguments before they are parsed."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    present = {present_override(argument) for argument in arguments}
    return not flags & _ONLY_ANSWER and not _WITHOUT_RANKS & present


def _open_missing_streams() -> None:
    """Open the null device for streams that the shell closed (`>&-`), before a file gets their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this stream's
            os.set_inheritable(null, True)  # by the fork server
            setattr(sys, name, os.fdopen(null, "r" if number == 0 else "w", closefd=False))


def _silence_broken_streams() -> bool:
    """Redirect broken stdout and stderr to the null device; return True if any was broken."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)  # to be told of errors only
    broken = poll.poll(0)
    null = os.open(os.devnull, os.O_WRONLY)
    for number, _ in broken:
        os.dup2(null, number)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
