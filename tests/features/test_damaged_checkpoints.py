"""Whatever happens to a checkpoint's files: it is found before anything is read, told, and the one before is used."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import cli
from framework.checkpoint import complete_steps, find, load, read_manifest
from framework.checkpoint.format import FileFacts, Manifest, encode
from framework.checkpoint.lookup import last_whole
from framework.checkpoint.whole import damage
from framework.errors import CheckpointError
from tests.helpers import results

SHORT = ("recipe=toy", "logger=[jsonl,tensorboard]", "trainer.limit_test_batches=0", "trainer.log_every_n_steps=5")
KEPT = ("checkpoint.monitor=null", "checkpoint.save_top_k=-1", "checkpoint.every_n_epochs=null")
THREE = (*SHORT, *KEPT, "checkpoint.every_n_steps=10")
FILES = ["config.yaml", "generators.pt", "manifest.json", "model.pt", "training.pt"]


@pytest.fixture(scope="module")
def trained(train_once) -> Path:
    """A run with checkpoints of steps 10, 20 and 30."""
    run_dir: Path = train_once(*THREE, "trainer.max_steps=30")
    assert sorted(path.name for path in place(run_dir, 30).iterdir()) == FILES
    return run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "toy" / "copy", symlinks=True))


def place(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(flipped(content, 4 * len(content)))


def assert_the_one_before_is_used(run_dir: Path, named: str) -> None:
    """Instead of step 30, where `named` is damaged; who asks for that one is told so."""
    found = last_whole(run_dir / "checkpoints")
    assert found.directory == place(run_dir, 20)
    ((directory, fault),) = found.damaged
    assert directory == place(run_dir, 30)
    assert named in fault
    if not named.startswith("config.yaml"):  # which is no part to load
        with pytest.raises(
            CheckpointError, match=r"step_00000030 (is damaged|is not complete).*\nUse another"
        ) as caught:
            load_last(run_dir)
        assert str(caught.value).endswith("step_00000010, step_00000020")


def load_last(run_dir: Path) -> None:
    load(find(run_dir), map_location="cpu")


# Every file


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_a_bit_that_flips_anywhere_is_found(run: Path, name: str) -> None:
    file = place(run, 30) / name
    content = file.read_bytes()
    bits = 8 * len(content)
    for bit in {0, bits - 1, *random.Random(0).sample(range(bits), 150)}:
        file.write_bytes(flipped(content, bit))
        assert_the_one_before_is_used(run, named=f"{name} has another checksum")
    file.write_bytes(content)
    assert last_whole(run / "checkpoints").directory == place(run, 30)


def test_a_bit_that_flips_anywhere_in_the_manifest_is_found_or_changes_nothing(run: Path) -> None:
    file = place(run, 30) / "manifest.json"
    content, wanted = file.read_bytes(), read_manifest(place(run, 30))
    unchanged = 0
    for bit in range(0, 8 * len(content), 7):  # every byte, each another bit of it
        file.write_bytes(flipped(content, bit))
        fault = damage(place(run, 30), thorough=False)
        if fault is None:
            unchanged += 1
            assert read_manifest(place(run, 30)) == wanted
        else:
            assert "manifest.json can't be" in fault
    assert unchanged < 5
    file.write_bytes(flipped(content, 4 * len(content)))
    assert_the_one_before_is_used(run, named="manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_ends_too_early_is_found(run: Path, name: str) -> None:
    file = place(run, 30) / name
    content = file.read_bytes()
    for sixteenth in range(16):
        file.write_bytes(content[: len(content) * sixteenth // 16])
        assert_the_one_before_is_used(run, named=name)
        assert list(complete_steps(run / "checkpoints")) == [10, 20]  # nor is it kept in a good one's place
    file.write_bytes(content + b"\n")
    if name != "manifest.json":  # one more end of a line is no damage there
        assert_the_one_before_is_used(run, named=f"{name} has {len(content) + 1} bytes instead of {len(content)}")


def swap(directory: Path) -> None:
    """The weights of another moment, of the same size."""
    shutil.copy(directory.with_name("step_00000010") / "model.pt", directory)


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def put_a_file_there(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("not a checkpoint")


def rename_another(directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name("step_00000010"), directory)


def make_unreadable(directory: Path) -> None:
    (directory / "training.pt").unlink()
    (directory / "training.pt").mkdir()


@pytest.mark.parametrize(
    ("deed", "fault"),
    [
        (lambda directory: (directory / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda directory: (directory / "model.pt").unlink(), "model.pt is missing"),
        (lambda directory: (directory / "config.yaml").unlink(), "config.yaml is missing"),
        (swap, "model.pt has another checksum than when it was written"),
        (empty, "it has no manifest.json"),
        (shutil.rmtree, "it is gone"),
        (put_a_file_there, "it is no directory"),
        (rename_another, "its manifest.json is of step 10"),
        (make_unreadable, "training.pt has 4096 bytes instead of"),
    ],
)
def test_what_else_can_be_wrong(run: Path, deed: Callable[[Path], object], fault: str) -> None:
    deed(place(run, 30))
    found = last_whole(run / "checkpoints")
    assert found.directory == place(run, 20)
    ((directory, said),) = found.damaged
    assert directory == place(run, 30)
    assert said.startswith(fault)


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["model.pt", "training.pt", "generators.pt"])
def test_a_file_that_would_run_code_is_damaged_and_with_a_forged_manifest_it_is_refused(run: Path, name: str) -> None:
    attack, attacked = io.BytesIO(), run / "attacked"
    torch.save({"weight": Attack(attacked)}, attack)
    for content in (attack.getvalue(), pickle.dumps(Attack(attacked), protocol=2)):
        (place(run, 30) / name).write_bytes(content)
        assert_the_one_before_is_used(run, named=f"{name} has {len(content)} bytes instead of")
        manifest = read_manifest(place(run, 30))
        facts = FileFacts(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
        forged = Manifest(**{**vars(manifest), "files": {**manifest.files, name: facts}})
        before = (place(run, 30) / "manifest.json").read_text()
        (place(run, 30) / "manifest.json").write_text(encode(forged))
        with pytest.raises(CheckpointError, match=f"{name} holds Python objects"):
            load_last(run)
        (place(run, 30) / "manifest.json").write_text(before)
    assert not attacked.exists()


# The whole command


@pytest.fixture(scope="module")
def whole(train_once) -> Path:
    """What was never damaged."""
    return train_once(*THREE, "trainer.max_steps=40")


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "procs"),
    [("resume=auto recipe=toy", 1), ("resume={run}", 2), ("resume={run}/checkpoints/last", 1)],
)
def test_a_run_goes_on_from_the_newest_whole_one(train, run, whole, how, procs):
    """`last` names one that is damaged, or, where the link itself is typed, one that is gone."""
    if how.endswith("last"):
        shutil.rmtree(place(run, 30))
        fault = "it is gone"
    else:
        flip(place(run, 30) / "training.pt")
        fault = "training.pt has another checksum than when it was written"
    (place(run, 20) / "manifest.json").unlink()
    record = (run / "run.json").read_text()
    (run / "run.json").write_text(record.replace('"finished"', '"failed"'))
    processes = (f"topology.procs_per_node={procs}", "data.global_batch_size=20")
    train(*how.format(run=run).split(), "trainer.max_steps=40", *processes)
    log = results.log(run).splitlines()
    lines = [
        f"The checkpoint {place(run, 30)} can't be used: {fault}. An earlier one is; nothing is deleted",
        f"The checkpoint {place(run, 20)} can't be used: it has no manifest.json. An earlier one is; "
        "nothing is deleted",
    ]
    for line in lines:
        assert log.count(line) == 1  # printed, too
        assert sum(logged.endswith(f"WARNING {line}") for logged in log) == 1
    assert log.index(lines[0]) < log.index(lines[1]) < log.index("Resuming after step 10, in epoch 0")
    assert results.saved_steps(run) == [10, 20, 30, 40]  # replaced where training came to their steps again
    assert all(damage(place(run, step)) is None for step in (10, 20, 30, 40))
    tolerance = 0.0 if procs == 1 else 1e-6
    results.assert_same(results.weights(run), results.weights(whole), tolerance=tolerance)
    curve = results.curve(whole, "train/loss")
    assert results.curve(run, "train/loss") == {step: pytest.approx(loss, rel=1e-5) for step, loss in curve.items()}
    assert results.repeated(run) == {}
    assert [event.step for event in results.events(run).Scalars("train/loss")] == list(curve)


def test_a_damaged_one_is_neither_the_best_nor_deleted(train, run):
    """Before training comes to its step again: `best` and retention go by the whole ones."""
    flip(place(run, 30) / "model.pt")
    few = ("checkpoint.save_top_k=1", "checkpoint.save_last_k=1")
    train(f"resume={run}", "trainer.max_steps=23", "checkpoint.every_n_steps=1", *few)
    assert results.pointed(run, "last") == 23
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_00000023", "step_00000030"]


def test_where_none_is_whole_the_run_is_refused_and_left_as_it_is(train, run, capfd):
    for step, name in ((10, "model.pt"), (20, "config.yaml"), (30, "generators.pt")):
        flip(place(run, step) / name)
    before = (run / "metrics.jsonl").read_text()
    train(f"resume={run}", "trainer.max_steps=40", status=2)
    printed = capfd.readouterr().err
    for step, name in ((10, "model.pt"), (20, "config.yaml"), (30, "generators.pt")):
        assert f"step_{step:08d}: {name} has another checksum than when it was written\n" in printed
    assert "Traceback" not in printed
    assert (run / "metrics.jsonl").read_text() == before
    assert len(list((run / "checkpoints").glob("step_*"))) == 3


@pytest.mark.parametrize(
    "typed",
    [
        ("resume={run}/checkpoints/step_00000030", "trainer.max_steps=40"),
        ("trainer.limit_test_batches=null", "job=eval", "checkpoint.path={run}"),
        (*SHORT, "init_from={run}/checkpoints/step_00000030"),
    ],
)
def test_what_is_named_is_never_replaced_by_another(run, warm, tmp_path, monkeypatch, capfd, typed):
    flip(place(run, 30) / "model.pt")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trainer.gpus=0", *(text.format(run=run) for text in typed)], warm=warm) == 2
    printed = capfd.readouterr().err
    assert "step_00000030 is damaged: model.pt has another checksum" in printed
    assert "step_00000010, step_00000020" in printed
    assert "Traceback" not in printed


OWN = '''
from pathlib import Path

class Damage:
    """Flips a bit of the newest checkpoint after a step, and fails; once."""
    def __init__(self, folder, after): self.folder, self.after = Path(folder), after
    def on_train_step_end(self, report):
        if report.step == self.after and not Path("done").exists():
            Path("done").touch()
            (file,) = self.folder.glob("toy/*/checkpoints/last/training.pt")
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            raise ValueError("the deed was done")
'''


@pytest.mark.multiproc
def test_a_restart_goes_on_from_the_newest_whole_one(train, whole, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = ("+callbacks.own._target_=own.Damage", f"+callbacks.own.folder={tmp_path}/outputs", "+callbacks.own.after=35")
    elastic = ("launcher=elastic", "launcher.max_restarts=1", "checkpoint.asynchronous=false")
    run_dir = train(*THREE, "trainer.max_steps=40", *elastic, *own)
    line = f"The checkpoint {place(run_dir, 30)} can't be used: training.pt has another checksum"
    assert results.log(run_dir).count(f"WARNING {line}") == 1
    assert results.log(run_dir).count(line) == 2  # and printed
    assert "Restart 1: resuming after step 20" in results.log(run_dir)
    results.assert_same(results.weights(run_dir), results.weights(whole))
    assert results.repeated(run_dir) == {}
