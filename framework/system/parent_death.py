"""A child that never outlives its parent, whatever ends the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(expected_parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; leave at once if it has ended already.

    `expected_parent` is the process id the caller was started by. Linux only: elsewhere nothing is asked for, and a
    closed socket is what tells the fork server. The request is dropped by fork(), so every child makes its own.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the request was made; then nothing would ever arrive.
    if os.getppid() != expected_parent:
        os._exit(1)
