"""The progress lines at the bottom of the terminal, redrawn while a run trains; other output appears above them."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TextIO, cast, final

from rich.console import Console
from rich.text import Text

from framework.config.schema import ProgressMode
from framework.launch.child import Tee
from framework.system.output import ERASE_BELOW, HIDE_CURSOR, SHOW_CURSOR

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
    """Rows at the bottom of the terminal, which `show` redraws in place. There is no thread.

    While it is open, lines printed to Python's standard streams appear above the rows, and go to the log as before.
    `stop` leaves the last rows on the terminal and restores the streams.

    The cursor rests on an empty line above the rows. So what other processes write to the terminal, or what it echoes
    (`^C`), is kept, and the next redraw erases all that lies below.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._terminal = console.file
        self._rows = Text()
        # Threads of the user may print.
        self._lock = threading.RLock()
        self._restore: list[Callable[[], None]] = []
        for name in ("stdout", "stderr"):
            self._print_above(name)
        self._write(HIDE_CURSOR)

    def show(self, rows: Iterable[Row]) -> None:
        with self._lock:
            self._rows = self._drawn(rows)
            self._redraw()

    def print_above(self, lines: str) -> None:
        """Print whole lines above the rows."""
        with self._lock:
            self._redraw(lines)

    def stop(self) -> None:
        for restore in self._restore:
            restore()
        self._write(f"\r{ERASE_BELOW}{self._rendered()}{SHOW_CURSOR}")

    def _print_above(self, name: str) -> None:
        """Have a standard stream print above the rows."""
        stream: Any = getattr(sys, name)
        if name == "stderr" and not stream.isatty():
            return
        if isinstance(stream, Tee):
            # What is printed goes to the log as before.
            lines_above = _LinesAbove(self, stream.terminal)
            self._restore += [lines_above.finish, partial(setattr, stream, "terminal", stream.terminal)]
            stream.terminal = cast("TextIO", lines_above)
        else:
            lines_above = _LinesAbove(self, stream)
            self._restore += [lines_above.finish, partial(setattr, sys, name, stream)]
            setattr(sys, name, lines_above)

    def _redraw(self, lines_above: str = "") -> None:
        rows = self._rendered()
        up = f"\x1b[{rows.count(chr(10)) + 1}A"
        self._write(f"\r{ERASE_BELOW}{lines_above}\n{rows}{up}\r")

    def _rendered(self) -> str:
        """Return the rows as the terminal gets them, each with its line end; no more than its height allows."""
        with self._console.capture() as capture:
            self._console.print(self._rows)
        lines = capture.get().splitlines(keepends=True)
        return "".join(lines[: max(self._console.height - 2, 1)])

    def _write(self, text: str) -> None:
        # The terminal may be gone, or closed by the user's code.
        with suppress(OSError, ValueError):
            self._terminal.write(text)
            self._terminal.flush()

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


@final
class _LinesAbove(io.TextIOBase):
    """A standard stream while a view is open: it prints whole lines above the rows, and otherwise is as before."""

    def __init__(self, view: LiveView, stream: TextIO) -> None:
        self._view = view
        self._stream = stream
        # A line that has not ended yet.
        self._line = ""

    def write(self, text: str) -> int:
        lines, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if end:
            self._view.print_above(f"{lines}\n")
        return len(text)

    def finish(self) -> None:
        """Print what has no line end."""
        if self._line:
            self.write("\n")

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # settable in the base class
        return self._stream.encoding


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
