"""Whatever happens to a checkpoint's files is found before they are used, and an earlier checkpoint is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from framework.checkpoint import complete_steps, find, load, read_manifest
from framework.checkpoint.format import FORMAT_VERSION, encode
from framework.checkpoint.lookup import last_whole
from framework.checkpoint.store import point
from framework.errors import CheckpointError
from tests.unit.checkpoint.states import flip, write_small

FILES = ["config.yaml", "generators.pt", "manifest.json", "model.pt", "training.pt"]
STEP_10, STEP_20, STEP_30 = (f"step_{step:08d}" for step in (10, 20, 30))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (10, 20, 30):
        write_small(folder, step)
    point(folder, "last", step=30)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "checkpoints", symlinks=True))


def chosen(folder: Path) -> tuple[str | None, list[str]]:
    """The checkpoint to resume from, and what is wrong with those that would come before it."""
    found = last_whole(folder)
    name = None if found.directory is None else found.directory.name
    return name, [f"{directory.name}: {fault}" for directory, fault in found.damaged]


def assert_an_earlier_one_is_used(folder: Path, fault: str) -> None:
    name, damaged = chosen(folder)
    assert name == STEP_20
    assert len(damaged) == 1
    assert damaged[0].startswith(f"{STEP_30}: ")
    assert fault in damaged[0]
    if not fault.startswith("config.yaml"):  # which no training state is read from
        with pytest.raises(CheckpointError, match=rf"{STEP_30} .*\nUse another one of .*: {STEP_10}, {STEP_20}$"):
            load(find(folder), map_location="cpu")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_or_a_missing_end_is_found(folder: Path, name: str) -> None:
    file = folder / STEP_30 / name
    content, bits, wanted = file.read_bytes(), 8 * file.stat().st_size, read_manifest(folder / STEP_30)
    unchanged = 0
    for bit in {0, bits - 1, *random.Random(0).sample(range(bits), 60)}:
        flip(file, bit)
        if name == "manifest.json" and not last_whole(folder).damaged:  # another kind of white space
            unchanged += 1
            assert read_manifest(folder / STEP_30) == wanted
        else:
            assert_an_earlier_one_is_used(folder, fault=name)
        file.write_bytes(content)
    assert unchanged < 5
    for eighth in range(8):
        file.write_bytes(content[: len(content) * eighth // 8])
        assert_an_earlier_one_is_used(folder, fault=name)
        assert list(complete_steps(folder)) == [10, 20], "nor does it take a good one's place when others are deleted"
    if name != "manifest.json":
        file.write_bytes(content + b"\n")
        assert_an_earlier_one_is_used(folder, fault=f"{name} has {len(content) + 1} bytes instead of {len(content)}")
    file.write_bytes(content)
    assert chosen(folder) == (STEP_30, [])


def swap_weights(directory: Path) -> None:
    shutil.copy(directory.with_name(STEP_10) / "model.pt", directory)


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def replace_by_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("not a checkpoint")


def replace_by_another_step(directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name(STEP_10), directory)


def replace_a_file_by_a_folder(directory: Path) -> None:
    (directory / "training.pt").unlink()
    (directory / "training.pt").mkdir()


@pytest.mark.parametrize(
    ("deed", "fault"),
    [
        (lambda directory: (directory / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda directory: (directory / "model.pt").unlink(), "model.pt is missing"),
        (lambda directory: (directory / "config.yaml").unlink(), "config.yaml is missing"),
        (swap_weights, "model.pt has another checksum"),
        (empty, "it has no manifest.json"),
        (shutil.rmtree, "it is gone"),
        (replace_by_a_file, "it is no directory"),
        (replace_by_another_step, "its manifest.json is of step 10"),
        (replace_a_file_by_a_folder, "training.pt has 4096 bytes instead of"),
    ],
)
def test_what_else_can_be_wrong(folder: Path, deed: Callable[[Path], object], fault: str) -> None:
    deed(folder / STEP_30)
    name, damaged = chosen(folder)
    assert name == STEP_20
    assert damaged[0].startswith(f"{STEP_30}: {fault}")


def test_only_checkpoints_that_are_needed_are_read(folder: Path) -> None:
    for step in (STEP_10, STEP_20):
        flip(folder / step / "model.pt")
    assert chosen(folder) == (STEP_30, [])


def test_a_checkpoint_newer_than_last_is_named_and_never_taken(folder: Path) -> None:
    """It is left of training that was given up, by a resumption from an older one."""
    point(folder, "last", step=20)
    flip(folder / STEP_20 / "training.pt")
    assert chosen(folder)[0] == STEP_10
    flip(folder / STEP_10 / "training.pt")
    with pytest.raises(CheckpointError, match=rf"resume=.*/{STEP_30}$"):
        last_whole(folder)


def test_without_the_pointer_the_newest_is_taken(folder: Path) -> None:
    (folder / "last").unlink()
    assert chosen(folder) == (STEP_30, [])
    flip(folder / STEP_30 / "model.pt")
    assert chosen(folder)[0] == STEP_20


def test_in_a_copy_without_symlinks_last_is_a_directory(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy", symlinks=False))
    assert chosen(copy) == ("last", [])
    flip(copy / "last" / "model.pt")
    assert chosen(copy)[0] == STEP_30


def test_a_checkpoint_of_a_newer_framework_is_not_passed_over(folder: Path) -> None:
    newer = replace(read_manifest(folder / STEP_30), format_version=FORMAT_VERSION + 1)
    (folder / STEP_30 / "manifest.json").write_text(encode(newer))
    with pytest.raises(CheckpointError, match="Update the framework"):
        last_whole(folder)
    assert list(complete_steps(folder)) == [10, 20]
