"""The log of one rank: `logs/rank_N.log`, whichever launcher started it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from framework.distributed.context import Context
from framework.run_dir import RunDir

logger = logging.getLogger("framework")


@contextmanager
def rank_log(run_dir: RunDir, context: Context) -> Iterator[None]:
    """Send the framework's log records to this rank's file while this is entered; begins with who writes there."""
    handler = logging.FileHandler(run_dir.rank_log(context.rank), encoding="utf-8")
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
        handler.close()
