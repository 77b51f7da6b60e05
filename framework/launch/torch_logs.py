"""Keep torch's compiled code from printing pages of C++ frames on the terminal when a connection is lost."""

from __future__ import annotations

import os
import sys


def silence_compiled_code() -> None:
    """Discard what is written to file descriptors 1 and 2 from now on, but not Python's streams.

    For processes that use the run's store and report its loss themselves.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1, errors="backslashreplace"))
        os.dup2(null, number)
    os.close(null)
