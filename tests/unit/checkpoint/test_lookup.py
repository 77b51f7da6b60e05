from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from framework.checkpoint import complete_steps, find, read_manifest
from framework.checkpoint.format import FORMAT_VERSION, Manifest, NewerFormatError, encode
from framework.checkpoint.lookup import LastWhole, last_whole
from framework.checkpoint.store import point
from framework.checkpoint.whole import damage
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
    with pytest.raises(CheckpointError, match=r"one file of a checkpoint, which is .*\. Use .*step_00000010\."):
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


# The last one that is whole


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step_{number:08d}"


def chosen(run: Path, *, thorough: bool = True) -> tuple[str | None, list[str]]:
    """Names of the one to go on from, and of those before it that are damaged."""
    found = last_whole(run / "checkpoints", look=partial(damage, thorough=thorough))
    name = None if found.directory is None else found.directory.name[-2:]
    return name, [f"{directory.name[-2:]}: {fault}" for directory, fault in found.damaged]


def test_the_last_one_is_taken_where_it_is_whole_and_nothing_else_is_read(run: Path) -> None:
    flip(step(run, 10) / "model.pt")
    flip(step(run, 20) / "model.pt")
    assert chosen(run) == ("30", [])
    assert last_whole(run / "checkpoints").directory == step(run, 30)


def test_where_there_never_was_one_there_is_none(tmp_path: Path) -> None:
    assert last_whole(tmp_path / "nowhere") == LastWhole(None)
    assert last_whole(tmp_path) == LastWhole(None)


def test_one_that_is_newer_than_last_is_named_and_never_taken(run: Path) -> None:
    """Such as after a resumption from an older one: what came after it then was given up."""
    point(run / "checkpoints", "last", step=20)
    flip(step(run, 20) / "training.pt")
    assert chosen(run) == ("10", ["20: training.pt has another checksum than when it was written"])
    flip(step(run, 10) / "training.pt")
    with pytest.raises(CheckpointError, match=r"Newer than `last` there is step_00000030: resume=.*/step_00000030$"):
        chosen(run)


def test_without_a_pointer_it_is_the_newest(run: Path) -> None:
    (run / "checkpoints" / "last").unlink()
    assert chosen(run) == ("30", [])
    (step(run, 30) / "manifest.json").unlink()
    assert chosen(run) == ("20", ["30: it has no manifest.json"])


def test_the_content_is_read_only_where_that_is_asked_for(run: Path) -> None:
    flip(step(run, 30) / "model.pt")
    assert chosen(run, thorough=False) == ("30", [])
    (step(run, 30) / "model.pt").write_bytes(b"short")
    assert chosen(run, thorough=False)[0] == "20"


def test_one_that_was_set_aside_counts_behind_the_one_in_its_place(run: Path) -> None:
    aside = run / "checkpoints" / ".replaced_step_00000030"
    step(run, 30).rename(aside)
    assert last_whole(run / "checkpoints").directory == aside
    write_small(run / "checkpoints" / "new", 30).rename(step(run, 30))
    assert last_whole(run / "checkpoints").directory == step(run, 30)
    flip(step(run, 30) / "model.pt")
    assert last_whole(run / "checkpoints").directory == aside


def test_in_a_copy_without_symlinks_last_is_a_directory(run: Path) -> None:
    copy = Path(shutil.copytree(run, run.parent / "copy", symlinks=False))
    assert last_whole(copy / "checkpoints").directory == copy / "checkpoints" / "last"
    flip(copy / "checkpoints" / "last" / "model.pt")
    assert last_whole(copy / "checkpoints").directory == step(copy, 30)
    point_back = write_small(copy / "older", 20)
    shutil.rmtree(copy / "checkpoints" / "last")
    point_back.rename(copy / "checkpoints" / "last")
    flip(copy / "checkpoints" / "last" / "model.pt")
    assert last_whole(copy / "checkpoints").directory == step(copy, 20)


def test_one_of_a_newer_framework_is_not_passed_over(run: Path) -> None:
    manifest = read_manifest(step(run, 30))
    newer = Manifest(**{**vars(manifest), "format_version": FORMAT_VERSION + 1})
    (step(run, 30) / "manifest.json").write_text(encode(newer))
    with pytest.raises(NewerFormatError, match="Update the framework"):
        chosen(run)
    assert list(complete_steps(run / "checkpoints")) == [10, 20]


def test_finding_needs_no_torch(run: Path) -> None:
    program = f"import sys; from pathlib import Path; from framework.checkpoint import find; find(Path({str(run)!r}))"
    subprocess.run([sys.executable, "-c", program + "; sys.exit('torch' in sys.modules)"], check=True, timeout=60)
