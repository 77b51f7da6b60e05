"""The progress lines at the bottom of the terminal, redrawn while a run trains; other output appears above them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TextIO, cast, final

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from framework.config.schema import ProgressMode
from framework.launch.child import Tee

_IN_NOTEBOOK = "JPY_PARENT_PID"
"""Set in Jupyter's kernels. `!command` has a terminal there, but one that can't move the cursor."""
_MAX_BAR = 40  # columns
_MAX_LINES = 2  # of each row; further items are left out


class Row(NamedTuple):
    """A label and its items. With `of`, a progress bar comes first: `done` of `of`."""

    label: str
    items: Sequence[str]
    done: int = 0
    of: int | None = None


@final
class LiveView:
    """Rows that `show` redraws in place. There is no thread.

    While it is open, output to Python's standard streams appears above the rows, and goes to the log as before. `stop`
    leaves the last rows on the terminal and restores the streams.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._restore: list[Callable[[], None]] = []
        self._live.start()
        for name in ("stdout", "stderr"):
            self._print_above(name)

    def show(self, rows: Iterable[Row]) -> None:
        with suppress(OSError):  # the terminal is gone
            self._live.update(self._drawn(rows), refresh=True)

    def stop(self) -> None:
        for restore in self._restore:
            restore()
        with suppress(OSError):
            self._live.stop()

    def _print_above(self, name: str) -> None:
        stream: Any = getattr(sys, name)
        if name == "stderr" and not stream.isatty():  # a file
            return
        if isinstance(stream, Tee):  # which writes to the log, too
            self._restore.append(partial(setattr, stream, "terminal", stream.terminal))
            stream.terminal = cast("TextIO", FileProxy(self._console, stream.terminal))
        else:
            self._restore.append(partial(setattr, sys, name, stream))
            setattr(sys, name, FileProxy(self._console, stream))

    def _drawn(self, rows: Iterable[Row]) -> Text:
        rows = [row for row in rows if row.items]
        begin = max((len(row.label) for row in rows), default=0) + 2
        width, text = self._console.width - begin, Text(no_wrap=True, overflow="ellipsis", end="")
        for number, row in enumerate(rows):
            text.append("\n" if number else "")
            text.append(f"{row.label:<{begin}}", "cyan")
            lines = _in_lines(row.items, width=width)
            if row.of:
                bar = max(min(width - len(lines[0]) - 2, _MAX_BAR), 0)
                done = min(bar * row.done // row.of, bar)
                filled, empty = ("#", "-") if self._console.options.ascii_only else ("━", "─")
                text.append(filled * done, "green").append(empty * (bar - done), "bright_black").append("  ")
            text.append(f"\n{' ' * begin}".join(lines))
        return text


def start_view(progress: ProgressMode) -> LiveView | None:
    """Return an open view; None if `progress` or the kind of standard output calls for plain lines."""
    out: Any = sys.stdout
    # On the terminal alone: the log, which gets what is printed too, would hold every redraw.
    console = Console(
        file=out.terminal if isinstance(out, Tee) else out, force_terminal=True if progress == "rich" else None
    )
    is_wanted = progress == "rich" or (progress == "auto" and out.isatty() and _IN_NOTEBOOK not in os.environ)
    return LiveView(console) if is_wanted and console.is_interactive else None


def _in_lines(items: Sequence[str], *, width: int) -> list[str]:
    """Return the items in lines of at most `width` columns; a longer item has a line of its own."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        elif len(lines) < _MAX_LINES:
            lines.append(item)
        else:
            lines[-1] = f"{lines[-1][: width - 3]}  …"
            break
    return lines
