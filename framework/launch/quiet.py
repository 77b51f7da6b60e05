"""What torch's compiled code prints where nobody should have to read it: pages of frames when a connection is lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import final


@final
class CompiledOutput:
    """From when it is made, file descriptors 1 and 2 of this process lead nowhere; Python's streams go on as they did.

    For processes that host or use the run's store and whose parent tells what there is to tell.
    """

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        self._redirect(Path(os.devnull))

    def to_log(self, path: Path) -> None:
        """Keep what is printed from here on; where the disk refuses, nothing is."""
        try:
            self._redirect(path)
        except OSError as error:
            print(f"{path} can't be written: {error.strerror or error}.", file=sys.stderr, flush=True)

    def _redirect(self, path: Path) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
