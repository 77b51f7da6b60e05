"""The log of one rank, `logs/rank_N.log`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from framework.system.shown_text import shown

logger = logging.getLogger("framework")


@contextmanager
def rank_log(path: Path, *, place: str) -> Iterator[None]:
    """Send the framework's log records to this rank's file while this is entered. The first says who writes there.

    Training continues if the disk is full: a few kB are kept and written once there is room.

    place: the rank's place in the run, for the first record.
    """
    handler = _Handler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # Otherwise a library or recipe that calls `logging.basicConfig` would show all of it on the terminal, too.
    logger.propagate = False
    try:
        logger.info("pid %d, %s", os.getpid(), place)
        yield
    finally:
        logger.propagate = propagates
        logger.setLevel(level)
        logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def warn(text: str) -> None:
    """Write a line to this rank's log and to standard output, control characters as text, passwords masked."""
    logger.warning("%s", shown(text))
    show(text)


def warn_of_disk(text: str, *, root: Path) -> None:
    """Warn that the disk refuses a file below the run directory `root`. If that is gone, the trainer reports it."""
    if root.is_dir():
        warn(text)


def show(text: str) -> None:
    """Print a line; rank 0's output is shown on the terminal."""
    print(shown(text), flush=True)


@final
class _Handler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Print no traceback for each record that a full disk doesn't take."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
