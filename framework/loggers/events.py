"""TensorBoard's event files, each record whole: `SummaryWriter` loses its thread, with a traceback, to a full disk."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from framework.appending import Appender
from framework.loggers.pace import Pace

_NUMBERS = itertools.count()


@final
class EventFile:
    """A new event file in `folder`. Half a second for the first one, which imports TensorBoard's formats.

    purge_step: TensorBoard hides what older files have of this step and later ones. Points are written at a `Pace`, and
    with `flush` and `close`.
    """

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
        self._waiting: list[tuple[float, int, Mapping[str, float]]] = []
        self._pace = Pace()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._records = RecordWriter(Appender(folder / name))
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """One point of every curve named."""
        self._waiting.append((time.time(), step, dict(values)))
        if self._pace.is_due():
            self._write_waiting()

    def text(self, tag: str, text: str, *, step: int) -> None:
        from torch.utils.tensorboard.summary import text as summary

        self._write_waiting()
        self._add(step=step, summary=summary(tag, text))

    def charts(self, charts: Mapping[str, Mapping[str, str]]) -> None:
        """Several curves in one chart: group → title → which, as a regular expression of their names."""
        from torch.utils.tensorboard.summary import custom_scalars

        groups = {
            group: {title: ["Multiline", [names]] for title, names in titles.items()}
            for group, titles in charts.items()
        }
        self._write_waiting()
        self._add(summary=custom_scalars(groups))

    def flush(self) -> None:
        """Give all of it to the kernel; try again what a full disk didn't take."""
        self._write_waiting()
        self._records.flush()

    def close(self) -> None:
        self._write_waiting()
        self._records.close()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        for wall_time, step, values in self._waiting:
            # In one record: what one costs is mostly its checksums.
            points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._add(step=step, summary=self._summary(value=points), wall_time=wall_time)
        self._waiting.clear()
        self._pace.note()

    def _add(self, *, wall_time: float | None = None, **content: Any) -> None:
        event = self._event(wall_time=time.time() if wall_time is None else wall_time, **content)
        self._records.write(event.SerializeToString())
