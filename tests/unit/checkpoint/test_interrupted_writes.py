"""The process that saves is stopped before any change that it makes to the disk: what it leaves is usable."""

from __future__ import annotations

import errno
import itertools
import mmap
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import complete_steps, find, load
from tests.unit.checkpoint.states import manager_of, names, target, write_small

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}
SAVES = ((1, 0.5), (2, 0.4), (2, 0.6), (3, 0.3))  # (step, loss): a new one, one that is replaced, two that are deleted
DONE, CHANGED = 0, 1  # bytes shared with the process: how many saves have ended, how many changes there were


def save_until(stop_at: int, deed: str, folder: Path, progress: mmap.mmap) -> None:
    """In a process of its own: make all saves, and be killed or get an error at the change of number `stop_at`."""
    counter = itertools.count(1)

    def before_a_change(event: str, arguments: Any) -> None:
        if event not in CHANGES or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        progress[CHANGED] = number = next(counter)
        if number == stop_at and deed == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == stop_at and deed == "refused":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    manager = manager_of(folder, warn=lambda _: None)
    sys.addaudithook(before_a_change)
    for number, (step, loss) in enumerate(SAVES, start=1):
        state = {"model": {"weight": torch.full((2000,), number)}, "training": {"number": number}, "generators": []}
        manager.save(state, step=step, epoch=0, metrics={"val/loss": loss})
        if manager.settle() is None:
            progress[DONE] = number


def run(stop_at: int, deed: str, folder: Path) -> tuple[int | None, int, int]:
    """The exit status of such a process, the number of the last save that ended well, and how many changes it made."""
    progress = mmap.mmap(-1, 2)
    process = multiprocessing.get_context("fork").Process(target=save_until, args=(stop_at, deed, folder, progress))
    process.start()
    process.join()
    return process.exitcode, progress[DONE], progress[CHANGED]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("deed", ["killed", "refused"])
def test_whenever_a_save_is_stopped_the_last_checkpoint_is_good(tmp_path: Path, deed: str) -> None:
    write_small(tmp_path / "warm_up", 1)  # what is imported for it is imported before processes are forked
    status, saved, num_changes = run(0, deed, tmp_path / "all")
    assert (status, saved) == (0, len(SAVES))
    assert num_changes > 10 * len(SAVES)
    for stop_at in range(1, num_changes + 1):
        folder = tmp_path / str(stop_at)
        (folder / "notes").mkdir(parents=True)
        status, saved, _ = run(stop_at, deed, folder)
        assert status == (-signal.SIGKILL if deed == "killed" else 0)
        for path, manifest in complete_steps(folder).values():
            read = load(path, map_location="cpu")
            assert read["model"]["weight"].unique().tolist() == [read["training"]["number"]]
            assert SAVES[read["training"]["number"] - 1][0] == manifest.step
        if saved:
            assert load(find(folder), map_location="cpu")["training"]["number"] >= saved, stop_at
            assert target(folder, "best") is not None or saved == 1
        write_small(folder, 99)
        assert not [name for name in names(folder) if name.startswith(".")], "the next save cleans up"
        assert "notes" in names(folder)
