"""From what someone typed, or a run that stopped, to a whole checkpoint, or to an error that says what there is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from framework.checkpoint import LocalStorage, complete_steps, find, load, read_manifest
from framework.errors import CheckpointError
from tests.helpers.internals import FORMAT_VERSION, LastUndamaged, encode_part, last_undamaged, point_checkpoint
from tests.unit.checkpoint.states import flip, write_small

FILES = ["config.yaml", "generators.pt", "manifest.json", "model.pt", "training.pt"]
STEP_10, STEP_20, STEP_30 = (f"step_{step:08d}" for step in (10, 20, 30))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (10, 20, 30):
        write_small(folder, step)
    point_checkpoint(LocalStorage(folder), "last", step=30)
    point_checkpoint(LocalStorage(folder), "best", step=10)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30, to be damaged; `best` is 10, `last` 30."""
    return Path(shutil.copytree(written, tmp_path / "run" / "checkpoints", symlinks=True))


# What someone typed


@pytest.mark.parametrize(
    ("path", "step"),
    [
        (".", 30),
        ("checkpoints", 30),
        ("checkpoints/best", 10),
        ("best", 10),
        ("last", 30),
        ("step_00000020", 20),
        ("checkpoints/step_00000020", 20),
    ],
)
def test_runs_pointers_and_steps_are_found_after_moving(folder: Path, path: str, step: int) -> None:
    moved = folder.parent.rename(folder.parent.with_name("elsewhere"))
    (moved.parent / "link").symlink_to(moved)
    for typed in (moved / path, moved.parent / "link" / path):
        assert find(typed) == moved / "checkpoints" / f"step_{step:08d}"


def test_last_is_the_pointer_or_else_the_newest(folder: Path) -> None:
    point_checkpoint(LocalStorage(folder), "last", step=20)
    assert find(folder).name == STEP_20
    (folder / "last").unlink()
    assert find(folder).name == STEP_30
    copy = Path(shutil.copytree(folder, folder.parent / "copy", symlinks=False))
    assert find(copy / "best") == copy / "best"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("run/checkpoints/step_00000021", r"no .*step_00000021.\nDid you mean .*checkpoints/step_00000020\?"),
        ("run/checkpoints/xyz", "Use another one of .*: step_00000010, step_00000020, step_00000030"),
        ("runn", r"Did you mean .*/run\?"),
        ("run/checkpoints/step_00000010/model.pt", r"is a file.*directory: outputs/RECIPE/RUN "),
        ("run/gone", r"gone points to step_00000040, which is gone(.|\n)*step_00000010, step_00000020, step_00000030"),
        ("run/incomplete", r"no manifest.json(.|\n)*Use another one of .*: step_00000010, step_00000020"),
        ("empty", "ended before its first checkpoint"),
    ],
)
def test_a_missing_checkpoint_lists_what_exists(folder: Path, path: str, said: str) -> None:
    (folder / "gone").symlink_to("step_00000040")
    (folder / "step_00000050").mkdir()
    (folder / "incomplete").symlink_to("step_00000050")
    root = folder.parent.parent
    (root / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=said):
        find(root / path)


def test_finding_needs_no_torch(written: Path) -> None:
    program = (
        f"import sys; from pathlib import Path; from framework.checkpoint import find; find(Path({str(written)!r}))"
    )
    subprocess.run([sys.executable, "-c", program + "; sys.exit('torch' in sys.modules)"], check=True, timeout=60)


# Damage


def chosen(folder: Path) -> tuple[str | None, list[str]]:
    """The checkpoint to resume from, and what is wrong with those that would come before it."""
    found = last_undamaged(folder)
    name = None if found.directory is None else found.directory.name
    return name, [f"{directory.name}: {fault}" for directory, fault in found.damaged]


def cut(file: Path, *, eighths: int) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * eighths // 8])


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_means_an_earlier_checkpoint(folder: Path, name: str) -> None:
    file = folder / STEP_30 / name
    content = file.read_bytes()
    num_bits = 8 * len(content)
    damages: list[Callable[[], object]] = [
        lambda: flip(file, 0),
        lambda: flip(file, num_bits // 2),
        lambda: flip(file, num_bits - 9),
        lambda: cut(file, eighths=0),
        lambda: cut(file, eighths=4),
        lambda: cut(file, eighths=7),
        file.unlink,
    ]
    for damage in damages:
        damage()
        step, (fault,) = chosen(folder)
        assert step == STEP_20
        assert fault.startswith(f"{STEP_30}: ")
        assert name in fault
        if name != "config.yaml":
            # No training state is read from config.yaml.
            with pytest.raises(CheckpointError, match=rf"{STEP_30} .*\nUse another one of .*: {STEP_10}, {STEP_20}$"):
                load(find(folder), map_location="cpu")
        file.write_bytes(content)
    file.write_bytes(content + b"\n")
    if name != "manifest.json":
        assert f"{name} has {len(content) + 1} bytes instead of {len(content)}" in chosen(folder)[1][0]
        assert list(complete_steps(folder)) == [10, 20], "nor does it take a good one's place when others are deleted"


def swap_weights(directory: Path) -> None:
    shutil.copy(directory.with_name(STEP_10) / "model.pt", directory)


def replace_by_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("not a checkpoint")


def replace_by_another_step(directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name(STEP_10), directory)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (swap_weights, "model.pt has another checksum"),
        (shutil.rmtree, "it is gone"),
        (replace_by_a_file, "it isn't a directory"),
        (replace_by_another_step, "its manifest.json is of step 10"),
    ],
)
def test_other_directories_are_skipped(folder: Path, damage: Callable[[Path], object], fault: str) -> None:
    damage(folder / STEP_30)
    name, damaged = chosen(folder)
    assert name == STEP_20
    assert damaged[0].startswith(f"{STEP_30}: {fault}")
    assert list(complete_steps(folder)) == [10, 20, 30] if damage is swap_weights else [10, 20]


def test_a_checkpoint_newer_than_last_is_never_taken(folder: Path) -> None:
    """Such a checkpoint belongs to training that was abandoned by resuming from an older one."""
    point_checkpoint(LocalStorage(folder), "last", step=20)
    flip(folder / STEP_20 / "training.pt")
    assert chosen(folder)[0] == STEP_10
    flip(folder / STEP_10 / "training.pt")
    with pytest.raises(CheckpointError, match=rf"are damaged:\n  {STEP_20}: .*\n  {STEP_10}: "):
        last_undamaged(folder)


def test_without_a_pointer_the_newest_whole_is_taken(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy", symlinks=False))
    assert chosen(copy) == (STEP_30, []), "a copy without symlinks"
    (folder / "last").unlink()
    assert chosen(folder) == (STEP_30, [])
    flip(folder / STEP_30 / "model.pt")
    assert chosen(folder)[0] == STEP_20
    assert last_undamaged(folder / "nowhere") == LastUndamaged(None)


def test_a_newer_frameworks_checkpoint_is_not_skipped(folder: Path) -> None:
    newer = replace(read_manifest(folder / STEP_30), format_version=FORMAT_VERSION + 1)
    (folder / STEP_30 / "manifest.json").write_text(encode_part(newer))
    with pytest.raises(CheckpointError, match="Update the framework"):
        last_undamaged(folder)
    assert list(complete_steps(folder)) == [10, 20]
