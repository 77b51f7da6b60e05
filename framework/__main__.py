"""`python -m framework`: start the fork server, then read the configuration; both load what they need meanwhile."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING

from framework.errors import EXIT_INTERRUPTED, FrameworkError

if TYPE_CHECKING:
    from framework.launch.leader import Leader
    from framework.launch.warm import WarmServer

# What ranks need, the heaviest first, loaded while the configuration is composed.
PRELOAD = (
    "torch",
    "torch.distributed",
    "framework.engine",
    "rich.progress",
)

_MAY_BE_A_RANK = {"RANK", "SLURM_PROCID", "PET_NNODES", "PET_NPROC_PER_NODE"}
"""Variables without which nothing else has started this process as a rank."""

EXIT_BROKEN_PIPE = 141  # what a shell reports of a command that SIGPIPE ended

_ONLY_ANSWER = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main() -> int:
    """The command. Gives its exit status: 0, 1 for a failed run, 2 for a wrong request, 75 for one stopped on request.

    130 where it was ended, 141 where nobody reads its output any more.
    """
    _open_missing_streams()
    try:
        status = _command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _silence_broken_streams():
            raise
        return EXIT_BROKEN_PIPE


def _command() -> int:
    arguments = sys.argv[1:]
    try:
        if _MAY_BE_A_RANK & os.environ.keys():
            status = _adopted(arguments)
            if status is not None:
                return status
        if not _starts_ranks(arguments):
            return _answer(arguments, warm=None)
        from framework.launch.warm import WarmServer

        warm = WarmServer.start(PRELOAD)
        try:
            return _answer(arguments, warm=warm)
        finally:
            warm.close()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _answer(arguments: list[str], *, warm: WarmServer | None = None, leader: Leader | None = None) -> int:
    from framework.cli import main as cli_main  # imports Hydra, while the fork server imports torch

    return cli_main(arguments, warm=warm, leader=leader)


def _adopted(arguments: list[str]) -> int | None:
    """Do this process's part where something else has started it as a rank; None where nothing has."""
    from framework.launch.environment import (
        ToldByRankZeroError,
        chooses_own_ranks,
        detect,
        typed_value,
        without_launch_arguments,
    )

    arguments = without_launch_arguments(arguments)
    if chooses_own_ranks(arguments):
        return None
    try:
        place = detect(os.environ, endpoint=typed_value(arguments, "topology.rdzv_endpoint"))
    except FrameworkError as error:
        if not isinstance(error, ToldByRankZeroError):
            print(error, file=sys.stderr)
        return error.exit_status
    if place is None:
        return None
    from framework.launch.adopted import take_part
    from framework.launch.child import leave

    status = take_part(place, arguments, lead=lambda leader: _answer(leader.arguments, leader=leader))
    # At once: torchrun ends all other ranks when it sees the first that failed, and rank 0 is the one that told why.
    return leave(status)


def _starts_ranks(arguments: list[str]) -> bool:
    """Whether the command may need processes; a guess from the words alone, made before anything is parsed."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    return not flags & _ONLY_ANSWER and "launcher=in_place" not in arguments


def _open_missing_streams() -> None:
    """Give what the shell has closed (`>&-`) to the null device, before a socket or file gets the number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.set_inheritable(number, True)  # the fork server needs it as well
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _silence_broken_streams() -> bool:
    """Point streams without a reader to the null device, so that nothing complains later; False if none was."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    broken = [number for number, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]
    null = os.open(os.devnull, os.O_WRONLY)
    for number in broken:
        os.dup2(null, number)
    os.close(null)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
