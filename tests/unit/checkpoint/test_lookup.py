from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework.checkpoint import complete_steps, find
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
def test_everything_one_may_type(run: Path, path: str, step: int) -> None:
    assert find(run / path) == run / "checkpoints" / f"step_{step:08d}"


def test_a_symlink_to_a_run_is_followed(run: Path) -> None:
    (run.parent / "newest").symlink_to(run)
    assert find(run.parent / "newest") == run / "checkpoints" / "step_00000030"


def test_pointers_are_relative_so_a_run_can_be_moved(run: Path) -> None:
    moved = run.rename(run.parent / "elsewhere")
    assert find(moved / "best") == moved / "checkpoints" / "step_00000010"


def test_last_is_what_the_pointer_says_and_the_newest_only_without_it(run: Path) -> None:
    point(run / "checkpoints", "last", step=20)
    assert find(run).name == "step_00000020"
    (run / "checkpoints" / "last").unlink()
    assert find(run).name == "step_00000030"


def test_a_copy_without_symlinks_is_found(run: Path) -> None:
    copy = Path(shutil.copytree(run, run.parent / "copy", symlinks=False))
    assert find(copy) == copy / "checkpoints" / "last"


def test_what_is_not_there_is_an_error_that_says_what_is(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no .*step_00000021.\nDid you mean .*checkpoints/step_00000020\?"):
        find(run / "checkpoints" / "step_00000021")
    with pytest.raises(CheckpointError, match="best, last, step_00000010, step_00000020, step_00000030"):
        find(run / "checkpoints" / "xyz")
    with pytest.raises(CheckpointError, match=r"Did you mean .*/run\?"):
        find(run.parent / "runn")
    with pytest.raises(CheckpointError, match=r"is a file\. Give the directory of the checkpoint: .*step_00000010"):
        find(run / "checkpoints" / "step_00000010" / "model.pt")


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="ended before its first checkpoint"):
        find(tmp_path / "run")


def test_a_dangling_pointer_names_the_others(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000030")
    with pytest.raises(CheckpointError, match="last points to step_00000030, which is gone") as caught:
        find(run)
    assert caught.match("Use another one of .*: step_00000010, step_00000020")


@pytest.mark.parametrize("text", [None, "{", ""])
def test_a_step_without_a_good_manifest_does_not_count(run: Path, text: str | None) -> None:
    manifest = run / "checkpoints" / "step_00000030" / "manifest.json"
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    assert list(complete_steps(run / "checkpoints")) == [10, 20]
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        find(run)
    assert caught.match("Use another one of .*: step_00000010, step_00000020")


def test_a_directory_renamed_by_hand_counts_under_no_step(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step_00000020").rename(folder / "step_00000025")
    assert list(complete_steps(folder)) == [10, 30]


def test_between_the_renames_of_a_replacement_the_old_one_counts(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step_00000030").rename(folder / ".replaced_step_00000030")
    assert find(run) == folder / ".replaced_step_00000030"
    assert list(complete_steps(folder)) == [10, 20, 30]


def test_finding_needs_no_torch(run: Path) -> None:
    program = f"import sys; from pathlib import Path; from framework.checkpoint import find; find(Path({str(run)!r}))"
    subprocess.run([sys.executable, "-c", program + "; sys.exit('torch' in sys.modules)"], check=True, timeout=60)
