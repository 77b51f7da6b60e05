"""A rank's heartbeat: a thread that says twice a second that the process runs and how many collectives it has begun.

The number tells who waits from who is waited for: ranks that are in a collective have begun one more than those that
have yet to come. A process that is stopped, or whose interpreter is held up, falls silent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from framework.pulse import COUNTED_GROUP, Pulse

INTERVAL_S = 0.5


@contextmanager
def beating(pulse: Pulse) -> Iterator[None]:
    """Beat while this is entered. Nothing of it is on the step path."""
    ended = threading.Event()

    def beat() -> None:
        begun = 0
        while not ended.wait(INTERVAL_S):
            begun = max(begun, _collectives())  # 0 again once the group is destroyed: that is no step back
            pulse.beat(begun)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _collectives() -> int:
    """How many collectives this rank has begun, of the default group and of those that are counted with it; 0 without a
    group, or one that doesn't count. All ranks begin them in one order.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    try:
        c10d = distributed.distributed_c10d
        beside = (each for each in list(c10d._world.pg_map) if each.group_desc == COUNTED_GROUP)
        return sum(int(each._get_sequence_number_for_group()) for each in (c10d._get_default_group(), *beside))
    except (RuntimeError, ValueError):  # a backend that doesn't count, or the group was destroyed just now
        return 0
