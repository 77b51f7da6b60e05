"""A tracker whose library fails, and a callback that ends a run at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from tests.helpers.internals import Tracker


class Fake(Tracker):
    """Appends what it is given to a file in the run directory, unless it raises or hangs."""

    name: ClassVar[str] = "fake"

    def __init__(
        self, run_dir: Any, *, trouble: str | None = None, where: str = "begin", close_timeout_s: float = 60.0
    ):
        super().__init__(run_dir, log_checkpoints=None, close_timeout_s=close_timeout_s)
        self.trouble = trouble
        self.where = where

    def meet(self, where: str) -> None:
        with (self.run_dir.path / "fake").open("a") as file:
            print(where, file=file)
        if where == self.where and self.trouble == "hang":
            time.sleep(1000)
        elif where == self.where and self.trouble == "raise":
            raise ValueError("the library's own")
        elif where == self.where and self.trouble == "exit":
            raise SystemExit(3)

    def begin(self):
        self.meet("begin")

    def write_earlier(self, rows):
        self.meet(f"earlier {len(rows)}")

    def write_numbers(self, row):
        self.meet("numbers")

    write_text = write_images = write_histogram = write_table = write_artifact = write_numbers

    def write_final(self, metrics):
        self.meet("final")

    def write_checkpoint(self, folder, names):
        self.meet("checkpoint")

    def finish(self, *, has_failed):
        self.meet(f"finish {has_failed}")


class KilledOnce:
    """Kills rank 0's process after a step, the first time."""

    def __init__(self, context: Any, step: int = 27) -> None:
        self.context = context
        self.step = step
        self.mark = Path("killed")

    def on_train_step_end(self, info):
        if self.context.is_main and info.step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stopping:
    """Suspends W&B's own process after a step: its library then waits forever."""

    def on_train_step_end(self, info):
        import psutil

        if info.step == 20:
            while not (found := [each for each in psutil.Process().children() if "wandb-core" in each.name()]):
                time.sleep(0.05)
            found[0].suspend()
