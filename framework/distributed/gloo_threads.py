"""How Linux schedules gloo's threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# The threads that read a group's connections, and those that run its collectives. A version of torch that names them
# otherwise keeps its own scheduling.
_NAMES = ("gloo_tcp_loop", "pt_gloo_runloop")
_THREADS = Path("/proc/self/task")


def let_gloo_finish_messages() -> int:
    """Keep gloo's threads from preempting other threads when they wake up; return how many threads that are.

    For groups that exist by now, if nothing is computed during an exchange: what is computed would delay it.

    A thread of gloo holds a connection's lock while it sends. The message wakes the threads that read connections, and
    one of them often takes the core from the sender. If it is this process's own reader, it polls for the lock, which
    gloo tries without waiting, until the scheduler's next tick: up to 4 ms. The policy SCHED_BATCH makes a thread that
    wakes up wait until a core is free. It needs no privilege.

    On two cores (torch 2.14, Linux 6.18), a step of `recipe=toy` with two processes takes 0.74 ms instead of 1.6 to 1.9
    and half the CPU time, and with 4 or 8 processes half the time. With free cores there is nothing to gain or lose.
    `recipe=digits`, with buckets that are exchanged during the backward, took 6 to 15 % longer on busy cores.

    https://man7.org/linux/man-pages/man7/sched.7.html
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    num_threads = 0
    # A thread may end meanwhile, and a container may forbid the call: gloo then works as before.
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            if (thread / "comm").read_text().strip() in _NAMES:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
                num_threads += 1
    return num_threads
