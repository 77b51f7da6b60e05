"""What a rank prints when its log lies on a full disk, and when nobody reads its terminal."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

from framework.launch.child import Tee

FULL = Path("/dev/full")


class Gone(io.StringIO):
    """A stream that refuses as long as it is told to."""

    refuses = True

    def write(self, text: str) -> int:
        if self.refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)

    def flush(self) -> None:
        if self.refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_that_takes_no_more_ends_nothing_and_goes_on_later() -> None:
    terminal, log = io.StringIO(), Gone()
    tee = Tee(terminal, log)
    print("one", file=tee, flush=True)
    tee.write_log("only in the log\n")
    log.refuses = False
    print("two", file=tee, flush=True)
    tee.write_log("only in the log\n")
    assert terminal.getvalue() == "one\ntwo\n"
    assert log.getvalue() == "two\nonly in the log\n"


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    terminal, log = Gone(), io.StringIO()
    print("one", file=Tee(terminal, log), flush=True)
    assert log.getvalue() == "one\n"


def test_without_a_terminal_a_full_disk_ends_nothing() -> None:
    program = (
        "import sys; from pathlib import Path; from framework.launch.child import log_to\n"
        f"log_to(Path({str(FULL)!r}), terminal=False)\n"
        "print('lost', flush=True); print('lost', file=sys.stderr, flush=True)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
