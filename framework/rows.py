"""Files of one JSON object per line, each with its `step`, which go on where a resumed run does. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.appending import Appender
from framework.run_dir import write_atomically


def open_rows(path: Path, *, last_step: int | None) -> Appender:
    """The file to append lines to, each with its end; what is written reaches the kernel at once.

    Lines of steps after `last_step` are cut off first, as is one that a kill left unfinished; None keeps all steps.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        text = path.read_text(errors="replace")
        kept = "".join(line for line, row in _whole(text) if last_step is None or row["step"] <= last_step)
        if kept != text:
            write_atomically(path, kept)
    return Appender(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What the whole lines of a file say; nothing where there is no file."""
    return [row for _, row in _whole(path.read_text(errors="replace"))] if path.exists() else []


def _whole(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError):
            continue
        yield line, row
