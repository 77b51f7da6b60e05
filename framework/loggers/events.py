"""TensorBoard's event files, each record whole: `SummaryWriter` loses its thread, with a traceback, to a full disk."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from framework.appending import Appender
from framework.loggers.pace import Pace
from framework.loggers.records import charts_event, record, scalars_event, start_event, text_event, version_event

_NUMBERS = itertools.count()


@final
class EventFile:
    """A new event file in `folder`.

    purge_step: TensorBoard hides what older files have of this step and later ones. Points are written at a `Pace`, and
    with `flush` and `close`.
    """

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        self._waiting: list[tuple[float, int, Mapping[str, float]]] = []
        self._pace = Pace()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = Appender(folder / name)
        self._write(version_event(time.time()))
        if purge_step is not None:
            self._write(start_event(time.time(), step=purge_step))

    def scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """One point of every curve named."""
        self._waiting.append((time.time(), step, dict(values)))
        if self._pace.is_due():
            self._write_waiting()

    def text(self, tag: str, text: str, *, step: int) -> None:
        self._write_waiting()
        self._write(text_event(time.time(), step=step, tag=tag, text=text))

    def charts(self, charts: Mapping[str, Mapping[str, str]]) -> None:
        """Several curves in one chart: group → title → which, as a regular expression of their names."""
        self._write_waiting()
        self._write(charts_event(time.time(), charts=charts))

    def flush(self) -> None:
        """Give all of it to the kernel; try again what a full disk didn't take."""
        self._write_waiting()
        self._file.flush()

    def close(self) -> None:
        self._write_waiting()
        self._file.close()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        events = (scalars_event(wall_time, step=step, values=values) for wall_time, step, values in self._waiting)
        records = b"".join(map(record, events))
        self._waiting.clear()
        self._file.write(records)
        self._pace.note()

    def _write(self, event: bytes) -> None:
        self._file.write(record(event))
