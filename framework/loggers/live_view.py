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

# The width of a progress bar, in columns.
_MAX_BAR = 40
# Of each row; further items are left out.
_MAX_LINES = 2


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
        # The terminal may be gone.
        with suppress(OSError):
            self._live.update(self._drawn(rows), refresh=True)

    def stop(self) -> None:
        for restore in self._restore:
            restore()
        with suppress(OSError):
            self._live.stop()

    def _print_above(self, name: str) -> None:
        stream: Any = getattr(sys, name)
        if name == "stderr" and not stream.isatty():
            return
        if isinstance(stream, Tee):
            # What is printed goes to the log as before.
            self._restore.append(partial(setattr, stream, "terminal", stream.terminal))
            stream.terminal = cast("TextIO", FileProxy(self._console, stream.terminal))
        else:
            self._restore.append(partial(setattr, sys, name, stream))
            setattr(sys, name, FileProxy(self._console, stream))

    def _drawn(self, rows: Iterable[Row]) -> Text:
        rows = [row for row in rows if row.items]
        indent = max((len(row.label) for row in rows), default=0) + 2
        width = self._console.width - indent
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        for number, row in enumerate(rows):
            if number > 0:
                text.append("\n")
            text.append(f"{row.label:<{indent}}", "cyan")
            lines = _in_lines(row.items, width=width)
            if row.of:
                self._append_bar(text, done=row.done, of=row.of, width=width - len(lines[0]) - 2)
            text.append(f"\n{' ' * indent}".join(lines))
        return text

    def _append_bar(self, text: Text, *, done: int, of: int, width: int) -> None:
        columns = max(min(width, _MAX_BAR), 0)
        filled = min(columns * done // of, columns)
        if self._console.options.ascii_only:
            text.append("#" * filled, "green").append("-" * (columns - filled), "bright_black")
        else:
            text.append("━" * filled, "green").append("─" * (columns - filled), "bright_black")
        text.append("  ")


def start_view(progress: ProgressMode) -> LiveView | None:
    """Return an open view; None if `progress` or the kind of standard output calls for plain lines."""
    out: Any = sys.stdout
    # On the terminal alone: the log, which gets what is printed too, would hold every redraw.
    terminal = out.terminal if isinstance(out, Tee) else out
    console = Console(file=terminal, force_terminal=True if progress == "rich" else None)
    if not console.is_interactive:
        return None
    if progress == "rich" or (progress == "auto" and out.isatty() and _IN_NOTEBOOK not in os.environ):
        return LiveView(console)
    return None


def _in_lines(items: Sequence[str], *, width: int) -> list[str]:
    """Return the items in lines of at most `width` columns; a longer item has a line of its own."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        elif len(lines) < _MAX_LINES:
            lines.append(item)
        else:
            # Says that there is more.
            lines[-1] = f"{lines[-1][: width - 3]}  …"
            break
    return lines
