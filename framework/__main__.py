"""`python -m framework`: start the fork server, then read the configuration; both load what they need meanwhile."""

from __future__ import annotations

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

_ONLY_ANSWER = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main() -> int:
    """The command. Gives its exit status: 0, 1 for a failed run, 2 for a wrong request, 130 after Ctrl-C."""
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


if __name__ == "__main__":
    sys.exit(main())
