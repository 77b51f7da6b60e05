"""`python -m framework`: start the fork server, then read the configuration; both load what they need meanwhile."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING

from framework.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from framework.launch.warm import WarmServer

# What ranks need, the heaviest first. Loaded while the configuration is composed; the first step would otherwise pull
# in torch._dynamo and more, seconds for each rank.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "framework.engine",
    "torch.utils.tensorboard",
    "rich.progress",
)

EXIT_BROKEN_PIPE = 141  # what a shell reports of a command that SIGPIPE ended

_ONLY_ANSWER = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main() -> int:
    """The command. Gives its exit status: 0, 1 for a failed run, 2 for a wrong request, 130 after Ctrl-C.

    141 where nobody reads its output any more.
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


def _answer(arguments: list[str], *, warm: WarmServer | None) -> int:
    from framework.cli import main as cli_main  # imports Hydra, while the fork server imports torch

    return cli_main(arguments, warm=warm)


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
