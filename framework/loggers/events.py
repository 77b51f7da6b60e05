"""TensorBoard's event files, each record whole: `SummaryWriter` loses its thread, with a traceback, to a full disk."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, final

from framework.appending import Appender

_NUMBERS = itertools.count()


@final
class EventFile:
    """A new event file in `folder`. Half a second for the first one, which imports TensorBoard's formats.

    purge_step: TensorBoard hides what older files have of this step and later ones.
    """

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._records = RecordWriter(Appender(folder / name))
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, name: str, value: float, *, step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        self._add(step=step, summary=scalar(name, value))

    def text(self, tag: str, text: str, *, step: int) -> None:
        from torch.utils.tensorboard.summary import text as summary

        self._add(step=step, summary=summary(tag, text))

    def flush(self) -> None:
        """Try again what a full disk didn't take; anything else is with the kernel already."""
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
