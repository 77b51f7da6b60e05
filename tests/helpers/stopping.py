"""Training that waits at a step until the test has asked it to stop, so that nothing depends on how fast it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.command import Started, started_framework

PAUSED_AT = 131
OVERRIDES = (
    *("recipe=toy", "trainer.gpus=0", "seed=1", "logger=[jsonl,tensorboard]", "checkpoint.monitor=null"),
    *("trainer.max_epochs=2", "trainer.limit_test_batches=0", "data.global_batch_size=20"),
)
PAUSE = ("+callbacks.pause._target_=pause.Pause", f"+callbacks.pause.at={PAUSED_AT}")
_CALLBACK = '''
import os, time
from pathlib import Path

class Pause:
    """Waits after step `at` until there is a file `go`, and says that it does."""
    def __init__(self, at): self.at = at
    def on_train_step_end(self, report):
        if report.step == self.at and not Path("go").exists():
            Path(f"paused_{os.environ.get('RANK', '0')}").touch()
            while not Path("go").exists():
                time.sleep(0.01)
'''


@contextmanager
def paused_training(folder: Path, *overrides: str, procs: int = 1) -> Iterator[Started]:
    """160 steps of training in `folder`, every rank waiting after step PAUSED_AT for `go_on`."""
    (folder / "pause.py").write_text(_CALLBACK)
    command = (*OVERRIDES, *PAUSE, f"topology.procs_per_node={procs}", *overrides)
    with started_framework(*command, cwd=folder) as started:
        deadline = time.monotonic() + 60.0
        while not all((folder / f"paused_{rank}").exists() for rank in range(procs)):
            assert started.process.poll() is None, started.printed()
            assert time.monotonic() < deadline, started.printed()
            time.sleep(0.02)
        yield started


def go_on(folder: Path) -> None:
    (folder / "go").touch()
