"""A save is stopped before any change that it makes to the disk, by a kill or an error: what is left is usable."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import complete_steps, find, load
from tests.unit.checkpoint.states import manager_of, names, target, write_small

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}
SAVES = ((1, 0.5), (1, 0.6), (2, 0.3))  # (step, loss): the first is replaced, and deleted after the last
Watcher = Callable[[], None]


def save_all(folder: Path, watchers: list[Watcher], watcher: Callable[[int], None]) -> list[int]:
    """Return 0 and the numbers of the saves that succeeded. The watcher gets the last one before every change."""
    (folder / "notes").mkdir(parents=True)
    manager = manager_of(folder, warn=lambda _: None)
    saved = [0]
    watchers.append(lambda: watcher(saved[-1]))
    for number, (step, loss) in enumerate(SAVES, start=1):
        state = {"model": {"weight": torch.full((2000,), number)}, "training": {"number": number}, "generators": []}
        manager.save(state, step=step, epoch=0, metrics={"val/loss": loss})
        if manager.settle() is None:
            saved.append(number)
    watchers.clear()
    return saved


def assert_usable(folder: Path, saved: int) -> None:
    """All that looks complete is; the last is at least the one that was saved; the next save cleans up."""
    for path, manifest in complete_steps(folder).values():
        read = load(path, map_location="cpu")
        assert read["model"]["weight"].unique().tolist() == [read["training"]["number"]]
        assert SAVES[read["training"]["number"] - 1][0] == manifest.step
    if saved:
        assert load(find(folder), map_location="cpu")["training"]["number"] >= saved
        assert target(folder, "best") is not None
    write_small(folder, 99)
    assert not [name for name in names(folder) if name.startswith(".")]
    assert "notes" in names(folder)


def kill_at_every_change(folder: Path, watchers: list[Watcher]) -> None:
    """What a kill would leave is a copy of the disk at that moment."""
    moments: list[int] = []

    def copy(saved: int) -> None:
        shutil.copytree(folder / "run", folder / str(len(moments)), symlinks=True)
        moments.append(saved)

    assert save_all(folder / "run", watchers, copy)[-1] == len(SAVES)
    assert len(moments) > 10 * len(SAVES)
    for number, saved in enumerate(moments):
        assert_usable(folder / str(number), saved)


def refuse_every_change(folder: Path, watchers: list[Watcher]) -> None:
    left = 0
    for number in range(1000):
        left = number

        def refuse(_: int) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        saved = save_all(folder / str(number), watchers, refuse)
        assert len(saved) >= len(SAVES), "at most one save fails, and the next one works"
        assert_usable(folder / str(number), saved[-1])
        if left >= 0:
            assert number > 10 * len(SAVES)
            return


def hooked(check: Callable[[Path, list[Watcher]], None], folder: Path) -> None:
    """In a process of its own, because Python never forgets such a hook."""
    watchers: list[Watcher] = []

    def before(event: str, arguments: Any) -> None:
        if event in CHANGES and watchers and (event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            watcher = watchers.pop()  # its own changes don't count
            try:
                watcher()
            finally:
                watchers.append(watcher)

    sys.addaudithook(before)
    check(folder, watchers)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("check", [kill_at_every_change, refuse_every_change])
def test_whenever_a_save_is_stopped_the_last_checkpoint_is_good(
    tmp_path: Path, check: Callable[[Path, list[Watcher]], None]
) -> None:
    process = multiprocessing.get_context("fork").Process(target=hooked, args=(check, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
