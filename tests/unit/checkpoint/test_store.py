from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import find, load, read_manifest, write
from framework.checkpoint.format import FileFacts, encode
from framework.checkpoint.store import check_state, clean, mend_pointer, point, remove
from framework.errors import CheckpointError, DiskError
from tests.helpers.disks import full_at
from tests.unit.checkpoint.states import small_state, trained, write_small

FILES = ["config.yaml", "generators.pt", "manifest.json", "model.pt", "training.pt"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace_file(directory: Path, name: str, content: bytes) -> None:
    """Put other content into a checkpoint, with a manifest that says it belongs there."""
    (directory / name).write_bytes(content)
    manifest = read_manifest(directory)
    facts = FileFacts(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
    manifest = type(manifest)(**{**vars(manifest), "files": {**manifest.files, name: facts}})
    (directory / "manifest.json").write_text(encode(manifest))


def test_a_training_comes_back_bit_for_bit(tmp_path: Path, own_state: None) -> None:
    model, optimizer, schedule = trained()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "training": {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "callbacks": {}},
        "generators": [{"torch": torch.get_rng_state()}],
    }
    directory = write(tmp_path, state, step=3, epoch=0, metrics={"val/loss": 0.5}, config_text="a: 1\n")
    assert names(tmp_path) == ["step_00000003"]
    assert names(directory) == FILES
    assert (directory / "config.yaml").read_text() == "a: 1\n"
    manifest = read_manifest(directory)
    assert (manifest.step, manifest.epoch, manifest.metrics) == (3, 0, {"val/loss": 0.5})
    assert manifest.torch_version == torch.__version__
    assert {name: (directory / name).stat().st_size for name in manifest.files} == {
        name: facts.size_bytes for name, facts in manifest.files.items()
    }

    read = load(directory, map_location="cpu")
    other_model, other_optimizer, other_schedule = trained()
    other_model.load_state_dict(read["model"])
    other_optimizer.load_state_dict(read["training"]["optimizer"])
    other_schedule.load_state_dict(read["training"]["schedule"])
    assert torch.equal(read["generators"][0]["torch"], state["generators"][0]["torch"])
    for one, two in ((model, optimizer), (other_model, other_optimizer)):
        torch.manual_seed(1)
        one(torch.randn(5, 3)).mean().backward()
        two.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other_model.state_dict()[name]), name


def test_the_weights_can_be_used_without_the_framework(tmp_path: Path) -> None:
    model, _, _ = trained()
    directory = write(
        tmp_path, {**small_state(), "model": model.state_dict()}, step=1, epoch=0, metrics={}, config_text=""
    )
    other, _, _ = trained()
    other.load_state_dict(torch.load(directory / "model.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_only_the_parts_asked_for_are_read(tmp_path: Path) -> None:
    directory = write_small(tmp_path, 1)
    (directory / "training.pt").unlink()
    assert set(load(directory, map_location="cpu", parts=("model",))) == {"model"}


def test_map_location_moves_the_model_alone(tmp_path: Path) -> None:
    read = load(write_small(tmp_path, 1), map_location="meta")
    assert read["model"]["weight"].device.type == "meta"
    assert read["training"]["optimizer"]["state"][0]["step"].device.type == "cpu"
    assert read["generators"][0]["torch"].device.type == "cpu"


@pytest.mark.parametrize("name", ["model.pt", "training.pt", "generators.pt"])
@pytest.mark.parametrize("damage", ["flip a bit", "truncate", "empty", "remove"])
def test_a_damaged_file_is_found_and_another_checkpoint_named(tmp_path: Path, name: str, damage: str) -> None:
    write_small(tmp_path, 10)
    directory = write_small(tmp_path, 20)
    content = bytearray((directory / name).read_bytes())
    if damage == "flip a bit":
        content[len(content) // 2] ^= 1
    kept = {"truncate": len(content) - 1, "empty": 0}.get(damage, len(content))
    (directory / name).write_bytes(content[:kept])
    if damage == "remove":
        (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"step_00000020 is damaged: {name} (has|is missing)") as caught:
        load(directory, map_location="cpu")
    assert caught.match("Use another one of .*: step_00000010$")
    assert len(str(caught.value).splitlines()) == 2


def test_python_objects_are_refused_and_no_code_runs(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "attacked"),)

    directory = write_small(tmp_path / "checkpoints", 1)
    content = io.BytesIO()
    torch.save({"weight": Attack()}, content)
    for attack in (content.getvalue(), pickle.dumps(Attack(), protocol=2)):
        replace_file(directory, "model.pt", attack)
        with pytest.raises(CheckpointError, match=r"model\.pt holds Python objects"):
            load(directory, map_location="cpu")
    assert not (tmp_path / "attacked").exists()


def test_a_state_that_could_not_be_read_back_is_refused() -> None:
    state = small_state()
    state["training"]["callbacks"] = {"my_cb": {"model": torch.nn.Linear(1, 1)}}
    with pytest.raises(CheckpointError, match=r"at callbacks\.my_cb\.model a torch\.nn"):
        check_state(state)


def test_a_state_with_other_parts_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="model"):
        check_state({"model": {}})


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    write_small(tmp_path, 5, value=1.0)
    directory = write_small(tmp_path, 5, value=2.0)
    assert names(tmp_path) == ["step_00000005"]
    assert load(directory, map_location="cpu")["model"]["bias"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("failing_call", [1, 2])
def test_replacing_leaves_a_good_one_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    write_small(tmp_path, 5, value=1.0)
    point(tmp_path, "last", step=5)
    rename, calls = Path.rename, 0

    def failing(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OSError(errno.EIO, "the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DiskError, match=r"step 5 can't be written .*the disk is gone"):
        write_small(tmp_path, 5, value=2.0)
    monkeypatch.undo()
    assert load(find(tmp_path), map_location="cpu")["model"]["bias"].tolist() == [1.0, 1.0]
    write_small(tmp_path, 6)
    assert names(tmp_path) == ["last", "step_00000005", "step_00000006"]
    assert load(find(tmp_path / "last"), map_location="cpu")["model"]["bias"].tolist() == [1.0, 1.0]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    write_small(tmp_path, 1)
    state = {**small_state(), "model": {"weight": torch.zeros(1_000_000)}}
    with full_at(1_000_000), pytest.raises(DiskError, match=r"step 2 can't be written .*: File too large"):
        write(tmp_path, state, step=2, epoch=0, metrics={}, config_text="")
    assert names(tmp_path) == ["step_00000001"]
    load(find(tmp_path), map_location="cpu")


def test_everything_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    write_small(tmp_path, 1)
    hidden = ".saving_step_00000001"
    assert sorted(events[:5]) == FILES
    assert events[4:] == ["manifest.json", hidden, "rename to step_00000001", tmp_path.name]


def test_a_file_system_that_cannot_flush_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    load(write_small(tmp_path, 1), map_location="cpu")


def test_left_overs_of_the_dead_are_cleaned_whatever_they_are(tmp_path: Path) -> None:
    for name in ("notes", ".saving_step_00000004", ".deleted_step_00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_bytes(b"half")
    (tmp_path / ".saving_last").symlink_to("step_00000001")
    (tmp_path / ".saving_x").write_bytes(b"a file")
    write_small(tmp_path, 1)
    assert names(tmp_path) == ["notes", "step_00000001"]


def test_a_file_in_a_checkpoints_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").write_bytes(b"a file")
    write_small(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001"]
    load(find(tmp_path / "step_00000001"), map_location="cpu")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_pointer_of_which_a_copy_has_made_a_directory_is_one_again(tmp_path: Path, is_there: bool) -> None:
    directory = write_small(tmp_path, 1)
    shutil.copytree(directory, tmp_path / "last")
    if not is_there:
        shutil.rmtree(directory)
    mend_pointer(tmp_path, "last")
    clean(tmp_path)
    assert names(tmp_path) == ["last", "step_00000001"]
    assert str((tmp_path / "last").readlink()) == "step_00000001"
    load(find(tmp_path), map_location="cpu")


def test_what_is_no_copy_of_a_checkpoint_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    mend_pointer(tmp_path, "best")
    assert names(tmp_path) == ["best_damaged"]
    mend_pointer(tmp_path, "last")  # there is none


def test_cleaning_keeps_the_good_one_of_a_half_done_replacement(tmp_path: Path) -> None:
    write_small(tmp_path, 1, value=1.0).rename(tmp_path / ".replaced_step_00000001")
    (write_small(tmp_path, 2) / "manifest.json").unlink()
    write_small(tmp_path / "other", 2, value=3.0).rename(tmp_path / ".replaced_step_00000002")
    clean(tmp_path)
    assert names(tmp_path) == ["other", "step_00000001", "step_00000002"]
    assert load(tmp_path / "step_00000002", map_location="cpu")["model"]["bias"].tolist() == [3.0, 3.0]


def test_pointers_move_and_are_relative_symlinks(tmp_path: Path) -> None:
    for step in (1, 2):
        write_small(tmp_path, step)
        point(tmp_path, "last", step=step)
        assert str((tmp_path / "last").readlink()) == f"step_{step:08d}"
    assert names(tmp_path) == ["last", "step_00000001", "step_00000002"]


def test_a_pointer_that_became_a_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "last" / "mine").mkdir(parents=True)
    write_small(tmp_path, 1)
    with pytest.raises(DiskError, match=r"The pointer .*last can't be moved to step_00000001: Is a directory"):
        point(tmp_path, "last", step=1)
    assert (tmp_path / "last" / "mine").is_dir()


def test_remove(tmp_path: Path) -> None:
    remove(write_small(tmp_path, 1))
    assert names(tmp_path) == []
