"""One checkpoint on the disk: what is read back from it, what is refused, and what a disk that refuses leaves."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint import LocalStorage, find, load, read_manifest
from framework.errors import CheckpointError, DiskError
from tests.helpers.disks import full_at
from tests.helpers.exact import tree_differences
from tests.helpers.internals import FORMAT_VERSION, FileFacts, encode_part, load_weights, write_checkpoint
from tests.helpers.source import ROOT
from tests.unit.checkpoint.states import names, small_state, write_small

FILES = ["config.yaml", "generators.pt", "manifest.json", "model.pt", "training.pt"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_layout_and_manifest_need_no_unpickling(tmp_path: Path, value: float) -> None:
    write_small(tmp_path, 30, value=1.0)
    metrics = {"val/loss": 0.1 + 0.2, "val/x": value}
    directory = write_small(tmp_path, 30, value=2.0, metrics=metrics, config_text="a: 1\n")
    assert (names(tmp_path), names(directory)) == (["step_00000030"], FILES)
    assert load(directory, map_location="cpu")["model"]["bias"].tolist() == [2.0, 2.0]
    assert (directory / "config.yaml").read_text() == "a: 1\n"
    text = (directory / "manifest.json").read_text()
    manifest = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (manifest["step"], manifest["epoch"], manifest["torch_version"]) == (30, 3, torch.__version__)
    assert manifest["metrics"] == {"val/loss": 0.1 + 0.2, "val/x": None}
    contents = {name: (directory / name).read_bytes() for name in FILES if name != "manifest.json"}
    assert manifest["files"] == {
        name: {"size_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"} for name, content in contents.items()
    }
    assert math.isnan(read_manifest(directory).metrics["val/x"])


def test_torch_alone_reads_back_a_state_exactly(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Linear(1, 300_001))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "training": {"optimizer": optimizer.state_dict(), "callbacks": {}},
        "generators": [{"torch": torch.get_rng_state()}],
    }
    directory = tmp_path / write_checkpoint(LocalStorage(tmp_path), state, step=3, epoch=0, metrics={}, config_text="")
    assert tree_differences(load(directory, map_location="cpu"), state) == []
    assert tree_differences(torch.load(directory / "model.pt", weights_only=True), state["model"]) == []


def test_checksums_are_the_same_without_isal(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path

sys.modules["isal"] = None
from tests.unit.checkpoint.states import write_small

write_small(Path({str(tmp_path)!r}), 1)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    assert LocalStorage(tmp_path).find_damage("step_00000001") is None


def test_only_the_requested_parts_are_read(tmp_path: Path) -> None:
    directory = write_small(tmp_path, 1)
    read = load(directory, map_location="meta")
    assert read["model"]["weight"].device.type == "meta"
    assert read["training"]["optimizer"]["state"][0]["step"].device.type == "cpu"
    assert read["generators"][0]["torch"].device.type == "cpu"
    (directory / "training.pt").unlink()
    assert set(load(directory, map_location="cpu", parts=("model",))) == {"model"}


# What is refused


class Attack:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("name", ["model.pt", "training.pt", "generators.pt"])
def test_code_is_refused_even_with_a_forged_manifest(tmp_path: Path, name: str) -> None:
    directory = write_small(tmp_path / "checkpoints", 1)
    as_torch_saves = io.BytesIO()
    torch.save({"weight": Attack(tmp_path / "attacked")}, as_torch_saves)
    for content in (as_torch_saves.getvalue(), pickle.dumps(Attack(tmp_path / "attacked"), protocol=2)):
        (directory / name).write_bytes(content)
        manifest = read_manifest(directory)
        facts = FileFacts(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
        forged = replace(manifest, files={**manifest.files, name: facts})
        (directory / "manifest.json").write_text(encode_part(forged))
        with pytest.raises(CheckpointError, match=f"{name} holds Python objects"):
            load(directory, map_location="cpu")
    assert not (tmp_path / "attacked").exists()


def test_a_manifest_that_is_newer_or_something_else(tmp_path: Path) -> None:
    """A format without our checksum may be anything; if the checksum is wrong, the version isn't believed."""
    file = write_small(tmp_path, 1) / "manifest.json"
    newer = encode_part(replace(read_manifest(file.parent), format_version=FORMAT_VERSION + 1, framework_version="9.0"))
    other = json.dumps({"format_version": FORMAT_VERSION + 1, "framework_version": "9.0", "shards": []})
    for text in (newer, other):
        file.write_text(text)
        with pytest.raises(
            CheckpointError, match=rf"format {FORMAT_VERSION + 1}, written by framework 9\.0.*\n?.*Update"
        ):
            read_manifest(file.parent)
    for text in (newer.replace('"step": 1', '"step": 2'), "", "[]", "{}", '{"format_version": 1}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match="damaged"):
            read_manifest(file.parent)


def test_weights_of_another_model_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)})
    given = nn.ModuleDict({"a": nn.Linear(4, 2), "c": nn.Linear(2, 2)}).state_dict()
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, given, source="run/best")
    message = str(caught.value)
    assert "run/best" in message
    assert 'Missing key(s) in state_dict: "b.weight", "b.bias"' in message
    assert 'Unexpected key(s) in state_dict: "c.weight", "c.bias"' in message
    assert "size mismatch for a.weight" in message


# The disk


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    write_small(tmp_path, 1)
    state = {**small_state(), "model": {"weight": torch.zeros(1_000_000)}}
    with full_at(1_000_000), pytest.raises(DiskError, match=r"step 2 can't be written .*: File too large"):
        write_checkpoint(LocalStorage(tmp_path), state, step=2, epoch=0, metrics={}, config_text="")
    assert names(tmp_path) == ["step_00000001"]
    load(find(tmp_path), map_location="cpu")


def test_everything_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync = os.fsync
    rename = Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    write_small(tmp_path, 1)
    named = events.index("rename to step_00000001")
    assert {*FILES} < {*events[:named]}
    assert events[named - 2] == "manifest.json", "the manifest is the last file, and then comes its directory"
    assert events[named + 1 :] == [tmp_path.name]


@pytest.mark.parametrize("lacks", ["direct writes", "flushing of directories"])
def test_limited_file_systems_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    real_open = os.open
    fsync = os.fsync

    def refusing_open(path: str, flags: int, *rest: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def refusing_fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, *(("open", refusing_open) if lacks == "direct writes" else ("fsync", refusing_fsync)))
    assert tree_differences(load(write_small(tmp_path, 1), map_location="cpu"), small_state(1.0)) == []
