"""Training that waits at a step until the test has asked it to stop, so that nothing depends on how fast it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.command import Started, started_framework

PAUSED_AT = 131
OVERRIDES = (
    "recipe=toy",
    "trainer.gpus=0",
    "seed=1",
    "logger=[jsonl,tensorboard]",
    "checkpoint.monitor=null",
    "trainer.max_epochs=2",
    "trainer.limit_test_batches=0",
    "data.global_batch_size=20",
)
PAUSE = ("+callbacks.pause._target_=pause.Pause", f"+callbacks.pause.at={PAUSED_AT}")
DEADLINE_S = 60.0
_CALLBACK = '''
import os, time
from pathlib import Path

class Pause:
    """Waits after step `at` until there is a file `go`; leaves its pid in a file before."""
    def __init__(self, at): self.at = at
    def on_train_step_end(self, report):
        if report.step == self.at and not Path("go").exists():
            file = Path(f"paused_{os.environ.get('RANK', '0')}")
            file.with_suffix(".tmp").write_text(str(os.getpid()))
            file.with_suffix(".tmp").rename(file)
            while not Path("go").exists():
                time.sleep(0.01)
'''


@contextmanager
def paused_training(folder: Path, *overrides: str, procs: int = 1) -> Iterator[Started]:
    """160 steps of training in `folder`, every rank waiting after step PAUSED_AT for `continue_training`."""
    write_pause(folder)
    command = (*OVERRIDES, *PAUSE, f"topology.procs_per_node={procs}", *overrides)
    with started_framework(*command, cwd=folder) as started:
        deadline = time.monotonic() + DEADLINE_S
        while not all((folder / f"paused_{rank}").exists() for rank in range(procs)):
            assert started.process.poll() is None, started.printed()
            assert time.monotonic() < deadline, started.printed()
            time.sleep(0.02)
        yield started


def write_pause(folder: Path) -> None:
    """Make the callback of `PAUSE`."""
    (folder / "pause.py").write_text(_CALLBACK)


def continue_training(folder: Path) -> None:
    (folder / "go").touch()


def wait_until(condition: Callable[[], object]) -> None:
    """Return once it holds. Fails the test after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@contextmanager
def while_paused(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in a thread while the block runs in the main thread, where signals arrive."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
