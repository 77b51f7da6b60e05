"""From what someone typed to the directory of one checkpoint, or to an error that says what there is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework.checkpoint import complete_steps, find
from framework.checkpoint.lookup import LastWhole, last_whole
from framework.checkpoint.store import point
from framework.errors import CheckpointError
from tests.unit.checkpoint.states import write_small


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints at 10, 20 and 30; `best` is 10, `last` 30."""
    run = tmp_path / "run"
    for step in (10, 20, 30):
        write_small(run / "checkpoints", step)
    point(run / "checkpoints", "last", step=30)
    point(run / "checkpoints", "best", step=10)
    return run


@pytest.mark.parametrize(
    ("path", "step"),
    [
        (".", 30),
        ("checkpoints", 30),
        ("checkpoints/last", 30),
        ("checkpoints/best", 10),
        ("best", 10),
        ("last", 30),
        ("step_00000020", 20),
        ("checkpoints/step_00000020", 20),
    ],
)
def test_a_run_a_pointer_or_a_step_can_be_named_and_the_run_can_be_moved(run: Path, path: str, step: int) -> None:
    assert find(run / path) == run / "checkpoints" / f"step_{step:08d}"
    (run.parent / "link").symlink_to(run)
    assert find(run.parent / "link" / path) == run / "checkpoints" / f"step_{step:08d}"
    (run.parent / "link").unlink()
    moved = run.rename(run.parent / "elsewhere")
    assert find(moved / path) == moved / "checkpoints" / f"step_{step:08d}"


def test_last_is_what_the_pointer_says_and_without_it_the_newest(run: Path) -> None:
    point(run / "checkpoints", "last", step=20)
    assert find(run).name == "step_00000020"
    (run / "checkpoints" / "last").unlink()
    assert find(run).name == "step_00000030"
    copy = Path(shutil.copytree(run, run.parent / "copy", symlinks=False))
    assert find(copy / "best") == copy / "checkpoints" / "best"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("run/checkpoints/step_00000021", r"no .*step_00000021.\nDid you mean .*checkpoints/step_00000020\?"),
        ("run/checkpoints/xyz", "best, last, step_00000010, step_00000020, step_00000030"),
        ("runn", r"Did you mean .*/run\?"),
        ("run/checkpoints/step_00000010/model.pt", r"one file of a checkpoint.* Use .*step_00000010\."),
        ("run/gone", r"gone points to step_00000040, which is gone(.|\n)*step_00000010, step_00000020, step_00000030"),
        ("run/incomplete", r"no manifest.json(.|\n)*Use another one of .*: step_00000010, step_00000020"),
        ("empty", "ended before its first checkpoint"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(run: Path, path: str, said: str) -> None:
    (run / "checkpoints" / "gone").symlink_to("step_00000040")
    (run / "checkpoints" / "step_00000050").mkdir()
    (run / "checkpoints" / "incomplete").symlink_to("step_00000050")
    (run.parent / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=said):
        find(run.parent / path)


def test_a_run_without_checkpoints_has_no_last_one(tmp_path: Path) -> None:
    assert last_whole(tmp_path / "nowhere") == last_whole(tmp_path) == LastWhole(None)


def test_a_directory_renamed_by_hand_counts_under_no_step(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step_00000020").rename(folder / "step_00000025")
    assert list(complete_steps(folder)) == [10, 30]


def test_finding_needs_no_torch(run: Path) -> None:
    program = f"import sys; from pathlib import Path; from framework.checkpoint import find; find(Path({str(run)!r}))"
    subprocess.run([sys.executable, "-c", program + "; sys.exit('torch' in sys.modules)"], check=True, timeout=60)
