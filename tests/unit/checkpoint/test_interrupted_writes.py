"""A save is killed before any change that it makes to the disk: what is left is usable."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import LocalStorage, complete_steps, find, load
from tests.helpers.internals import point_checkpoint
from tests.unit.checkpoint.states import manager_of, names, target, write_small

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}
# Pairs of step and loss. After the second, training resumes from the first.
SAVES = ((1, 0.3), (2, 0.5), (2, 0.6), (3, 0.1))


def before_every_change(call: Callable[[], None]) -> None:
    """Have it called in this process from now on; its own changes don't count."""
    is_called = False

    def before(event: str, arguments: Any) -> None:
        nonlocal is_called
        if is_called or event not in CHANGES or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        is_called = True
        call()
        is_called = False

    sys.addaudithook(before)


def save_and_copy(folder: Path) -> None:
    """What a kill would leave is a copy of the disk at that moment, named by what was saved until then."""
    run = folder / "run"
    (run / "notes").mkdir(parents=True)
    manager = manager_of(run)
    saved = copies = 0

    def copy() -> None:
        nonlocal copies
        copies += 1
        shutil.copytree(run, folder / f"{saved}_{copies}", symlinks=True)

    before_every_change(copy)
    for number, (step, loss) in enumerate(SAVES, start=1):
        if number == 3:
            saved = 1
            manager.resume_from(1)
            point_checkpoint(LocalStorage(run), "last", step=1)
        state = {"model": {"weight": torch.full((2000,), number)}, "training": {"number": number}, "generators": []}
        manager.save(state, step=step, epoch=0, metrics={"val/loss": loss})
        assert manager.wait() is None
        saved = number
    # Python never removes such a hook.
    os._exit(0)


def assert_usable(folder: Path, *, saved: int) -> None:
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


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_killed_save_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=save_and_copy, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    copies = sorted(tmp_path.glob("[0-9]*"))
    assert len(copies) > 10 * len(SAVES)
    for copy in copies:
        assert_usable(copy, saved=int(copy.name.partition("_")[0]))
