"""The log of one rank: `logs/rank_N.log`, whichever launcher started it."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from framework.distributed.context import Context
from framework.run_dir import RunDir

logger = logging.getLogger("framework")


@contextmanager
def rank_log(run_dir: RunDir, context: Context) -> Iterator[None]:
    """Send the framework's log records to this rank's file while this is entered; begins with who writes there.

    A disk that refuses ends nothing: what it didn't take, up to a few kB, is written once there is room.
    """
    handler = _Handler(run_dir.rank_log(context.rank), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info(
            "pid %d, rank %d, local rank %d, world size %d, backend %s, node %d (%s), devices %s",
            os.getpid(),
            context.rank,
            context.local_rank,
            context.world_size,
            context.backend,
            context.node_rank,
            socket.gethostname(),
            ", ".join(str(device) for device in context.devices),
        )
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def warn(text: str) -> None:
    """Write it to this rank's log, and to standard output."""
    logger.warning(text)
    show(text)


def show(text: str) -> None:
    """Print it; what rank 0 prints is shown on the terminal."""
    with suppress(OSError):  # of a standard output that lies on a full disk
        print(text, flush=True)


@final
class _Handler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Not a traceback on the terminal for each record that a full disk didn't take."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
