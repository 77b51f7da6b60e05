"""The terminal that a run leaves behind."""

from __future__ import annotations

import sys
from contextlib import suppress

_SHOW_CURSOR = "\x1b[?25h"


def show_cursor() -> None:
    """A rank that was ended while it drew a progress bar has left the terminal's cursor hidden."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the terminal is gone, or the stream closed
            if stream.isatty():
                stream.write(_SHOW_CURSOR)
                stream.flush()
