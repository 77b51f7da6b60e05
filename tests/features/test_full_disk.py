"""A full disk costs checkpoints; training continues, and says at its end what isn't saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from framework.checkpoint import find_damage
from tests.helpers import disks, results

pytestmark = pytest.mark.multiproc

EVERY_STEP = ("recipe=toy", "logger=[jsonl,tensorboard]", "trainer.log_every_n_steps=1", "trainer.max_steps=50")
SAVES = ("checkpoint.every_n_steps=10", "checkpoint.every_n_epochs=null", "checkpoint.monitor=null")
ONE = "checkpoint.save_last_k=1"
SHORT = (*EVERY_STEP, *SAVES, ONE, "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
TWO = ("topology.procs_per_node=2", "data.global_batch_size=20")
OWN = '''
import os, time
from pathlib import Path

class Filler:
    """Fills the disk after one step, and makes room again after another."""
    def __init__(self, file, full_from, full_to):
        self.file, self.full_from, self.full_to = Path(file), full_from, full_to
    def on_train_step_end(self, report):
        if os.environ["RANK"] == "0" and report.step == self.full_from:
            deadline = time.monotonic() + 60
            while not any(self.file.parent.glob("toy/*/checkpoints/last/")) and time.monotonic() < deadline:
                time.sleep(0.01)  # until what was begun is written
            with self.file.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1024))
                except OSError:
                    pass
        if os.environ["RANK"] == "0" and report.step == self.full_to:
            self.file.unlink()
'''


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Puts a file system of so many KiB where the outputs go."""
    with disks.small_disk(tmp_path / "outputs") as mount:
        yield mount


def filled(tmp_path: Path, *, start: int, end: int = 0) -> list[str]:
    """The disk is full after step `start`, until step `end`; 0 for ever."""
    (tmp_path / "own.py").write_text(OWN)
    values = {"_target_": "own.Filler", "file": tmp_path / "outputs" / "filler", "full_from": start, "full_to": end}
    return [f"+callbacks.own.{key}={value}" for key, value in values.items()]


def whole_steps(run_dir: Path) -> list[int]:
    """The steps of the checkpoints. Fails the test if one isn't whole, or something half done lies there."""
    folder = run_dir / "checkpoints"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert all(find_damage(path) is None for path in folder.glob("step_*"))
    return results.saved_steps(run_dir)


def assert_all_logged(run_dir: Path, *, missing_in_tensorboard: range = range(0)) -> None:
    steps = list(range(1, 51))
    assert list(results.curve(run_dir, "train/loss")) == steps
    shown = [event.step for event in results.events(run_dir).Scalars("train/loss")]
    assert shown == sorted(set(shown))
    assert {*steps} - {*shown} <= {*missing_in_tensorboard}
    assert results.repeated(run_dir) == {}


def test_a_full_disk_fails_a_resumable_run(train, small_disk, tmp_path, capfd):
    small_disk(440)
    run_dir = train(*SHORT, *TWO, "checkpoint.asynchronous=true", *filled(tmp_path, start=15), status=1)
    printed = capfd.readouterr().err
    assert f"The checkpoint of step 50 can't be written to {run_dir}/checkpoints: No space left on device." in printed
    assert "The last good checkpoint is step_00000010." in printed
    assert "Traceback" not in printed
    assert printed.count("The checkpoint of step") == 1
    assert whole_steps(run_dir) == [results.pointed(run_dir, "last")] == [10]
    assert results.run_file(run_dir)["status"] != "finished"
    # Every line is whole.
    before = {row["step"] for row in results.rows(run_dir)}
    assert {*range(1, 11)} <= before < {*range(1, 51)}, "what the checkpoint of step 10 wrote out, at least"
    (tmp_path / "outputs" / "filler").unlink()
    train(f"resume={run_dir}", "~callbacks.own")
    assert "Resuming after step 10" in results.log(run_dir)
    assert whole_steps(run_dir) == [50]
    assert_all_logged(run_dir)


def test_the_next_save_works_once_there_is_room(train, small_disk, tmp_path):
    small_disk(440)
    waiting = "checkpoint.asynchronous=false"
    run_dir = train(*SHORT, waiting, *filled(tmp_path, start=15, end=35))
    assert whole_steps(run_dir) == [50]
    assert results.run_file(run_dir)["status"] == "finished"
    # What is missing lies between one written checkpoint and the next.
    assert_all_logged(run_dir, missing_in_tensorboard=range(11, 41))
    warnings = [line for line in results.log(run_dir).splitlines() if "WARNING" in line]
    of_checkpoints = [line for line in warnings if "The checkpoint of step" in line]
    assert len(of_checkpoints) == 2
    for step, line in zip((20, 30), of_checkpoints, strict=True):
        assert f"The checkpoint of step {step} can't be written" in line
    # One of the two files of numbers may have had room left in its last block.
    refused = sum("can't be written: " in line for line in warnings)
    again = sum("is writable again" in line for line in warnings)
    assert 1 <= refused == again <= 2
    assert len(warnings) == 2 + refused + again


# Before the first step


def test_too_little_room_is_reported_before_training(train, small_disk, capfd):
    small_disk(60)
    run_dir = train(*SHORT, *TWO, status=1)
    printed = capfd.readouterr().err
    assert "one takes about 4" in printed
    for remedy in (f"{run_dir}/checkpoints.\n", "path.outputs=FOLDER", "checkpoint=none"):
        assert remedy in printed
    assert "Traceback" not in printed
    assert results.saved_steps(run_dir) == []
    shutil.rmtree(run_dir)
    run_dir = train(*SHORT, "checkpoint=none", "trainer.max_steps=2")
    assert results.run_file(run_dir)["status"] == "finished"


def test_too_little_room_is_reported_before_resuming(train, small_disk, capfd):
    disk = small_disk(300)
    run_dir = train(*EVERY_STEP, "trainer.max_steps=2")
    with (disk / "filler").open("wb", buffering=0) as file:
        file.write(bytes(shutil.disk_usage(disk).free - 20 * 1024))
    train(f"resume={run_dir}", "trainer.max_steps=20", status=1)
    assert "There is no room for a checkpoint: one takes about " in capfd.readouterr().err
    assert whole_steps(run_dir) == [2]
