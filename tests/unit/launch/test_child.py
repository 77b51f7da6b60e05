"""What a rank prints when its log lies on a full disk, or nobody reads its terminal."""

from __future__ import annotations

import errno
import io
import os

from framework.launch.child import Tee


class Gone(io.StringIO):
    """A stream that refuses as long as `refuses` is set."""

    refuses = True

    def write(self, text: str) -> int:
        self.flush()
        return super().write(text)

    def flush(self) -> None:
        if self.refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stream_that_refuses_ends_nothing() -> None:
    terminal, log = io.StringIO(), Gone()
    tee = Tee(terminal, log)
    print("one", file=tee, flush=True)
    tee.write_log("only in the log\n")
    log.refuses = False
    print("two", file=tee, flush=True)
    tee.write_log("only in the log\n")
    assert terminal.getvalue() == "one\ntwo\n"
    assert log.getvalue() == "two\nonly in the log\n"
    print("three", file=Tee(Gone(), log), flush=True)
    assert log.getvalue().endswith("three\n")
