"""Files of a run that were damaged, edited or replaced since the run wrote them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.helpers import results
from tests.helpers.internals import compose
from tests.unit.checkpoint.states import flip

SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_test_batches=0", "trainer.log_every_n_steps=5")
STOPPED = (*SHORT, "checkpoint.every_n_steps=10", "trainer.max_steps=20")


@pytest.fixture
def run(shared_run, tmp_path: Path) -> Path:
    """A run of 20 steps, to be changed."""
    return Path(shutil.copytree(shared_run(*STOPPED), tmp_path / "outputs" / "toy" / "copy", symlinks=True))


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


# config.yaml and overrides.yaml


def test_edited_keys_are_shown_and_must_be_typed(train, run, shared_run, capfd):
    edit(run / "config.yaml", "\n  max_steps: 20\n", "\n  max_steps: 30\n")
    edit(run / "config.yaml", "\nseed: 0\n", "\nseed: 1\n")
    train(f"resume={run}", status=2)
    printed = capfd.readouterr().err
    assert "trainer.max_steps=30 (it was 20)" in printed
    assert "seed=1 (it was 0)" in printed
    assert "Traceback" not in printed
    train(f"resume={run}", "trainer.max_steps=30", status=2)
    printed = capfd.readouterr().err
    assert "seed=1 (it was 0)" in printed
    assert "max_steps" not in printed
    train(f"resume={run}", "trainer.max_steps=30", "seed=0")
    results.assert_same(results.weights(run), results.weights(shared_run(*STOPPED, "trainer.max_steps=30")))
    # The config.yaml is the run's own again.
    train(f"resume={run}")


def test_added_and_removed_keys_are_shown(train, run, capfd):
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["trainer"]["gradient_clip_val"]
    config["optimizer"]["foreach"] = True
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    train(f"resume={run}", status=2)
    printed = capfd.readouterr().err
    assert "~trainer.gradient_clip_val (it was null)" in printed
    assert "optimizer.foreach=true (it was not there)" in printed


def test_a_comment_in_the_configuration_changes_nothing(train, run):
    edit(run / "config.yaml", "\nseed: 0\n", "\nseed: 0  # as in the paper\n")
    train(f"resume={run}")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"seed: [", b"[" * 3000, b"a: &a [*a]\n"])
def test_an_unreadable_config_is_refused_with_a_copy(train, run, capfd, content):
    (run / "config.yaml").write_bytes(content)
    train(f"resume={run}", status=2)
    printed = capfd.readouterr().err
    assert "step_00000020/config.yaml is one" in printed
    assert "Traceback" not in printed


def test_a_rerun_of_an_edited_run_also_asks(train, run, capfd):
    edit(run / "config.yaml", "\nseed: 0\n", "\nseed: 1\n")
    train(f"rerun={run}", status=2)
    assert "seed=1 (it was 0)" in capfd.readouterr().err
    train(f"rerun={run}", "seed=1")


def test_changed_overrides_are_refused(train, run, capfd):
    edit(run / "overrides.yaml", "trainer.max_steps=20", "trainer.max_steps=28")
    for command in (f"resume={run}", f"rerun={run}"):
        train(command, status=2)
        printed = capfd.readouterr().err
        assert "overrides.yaml isn't what the run wrote" in printed
        assert "trainer.max_steps=20" in printed
    train("job=eval", f"checkpoint.path={run}", status=2)


def test_earlier_versions_resume_without_checksums(train, run):
    record = results.run_file(run)
    del record["files"], record["config"]
    (run / "run.json").write_text(json.dumps(record))
    edit(run / "config.yaml", "\n  max_steps: 20\n", "\n  max_steps: 30\n")
    train(f"resume={run}")
    assert results.results(run)["steps"] == 30
    edit(run / "config.yaml", "\n  max_steps: 30\n", "\n  max_steps: 40\n")
    train(f"resume={run}", status=2)


# run.json


@pytest.mark.parametrize("content", ["", "{", "[]", '{"earlier": 1}', '{"a": ' * 5000, "\0"])
def test_removing_a_refused_damaged_record_helps(train, run, capfd, content):
    (run / "run.json").write_text(content)
    train(f"resume={run}", status=2)
    printed = capfd.readouterr().err
    assert "run.json can't be read" in printed
    assert "remove it" in printed
    train("recipe=toy", "resume=auto", status=2)
    assert "run.json can't be read" in capfd.readouterr().err, "no new run begins in silence"
    (run / "run.json").unlink()
    train(f"resume={run}", "trainer.max_steps=25")
    assert results.results(run)["steps"] == 25


# What no process may wait for

PLACES = (
    "config.yaml",
    "overrides.yaml",
    "run.json",
    "metrics.jsonl",
    "logs/rank_0.log",
    "checkpoints/step_00000020/manifest.json",
    "checkpoints/step_00000020/model.pt",
    "media/val__x_1.png",
)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, pytest.param(device, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_waits_for_a_fifo_or_a_device(
    fork_server, monkeypatch, tmp_path, run, capfd, place, make: Callable[[Path], None]
):
    path = run / place
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    monkeypatch.chdir(tmp_path)
    assert compose.main([f"resume={run}", "trainer.max_steps=25", "trainer.gpus=0"], fork_server=fork_server) == 2
    printed = capfd.readouterr().err
    assert path.name in printed or "not a run directory" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/last", "metrics.jsonl", "logs", "logs/rank_0.log"])
def test_a_loop_of_symlinks_is_refused(train, run, capfd, place):
    path = run / place
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    train(f"resume={run}", "trainer.max_steps=25", status=2)
    printed = capfd.readouterr().err
    assert str(path) in printed
    assert "Traceback" not in printed


def test_swapped_files_and_folders_are_refused(train, run, capfd):
    log = run / "logs" / "rank_0.log"
    log.unlink()
    log.mkdir()
    train(f"resume={run}", "trainer.max_steps=25", status=2)
    assert f"{log} is a folder" in capfd.readouterr().err
    log.rmdir()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("step_00000020")
    train(f"resume={run}", "trainer.max_steps=25", status=2)
    assert f"{run / 'checkpoints'} isn't a folder" in capfd.readouterr().err


# The objects of a run that Python started

PROGRAM = """
import sys, torch, framework
from torch import nn
from torch.utils.data import TensorDataset

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

if __name__ == "__main__":
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    run = framework.train(model=make, data=data, loss=nn.CrossEntropyLoss(), name="objects",
        trainer={"max_steps": 8, "gpus": 0}, checkpoint={"every_n_steps": 4}, logger=["jsonl"])
    print(run.directory)
"""


@pytest.fixture(scope="module")
def objects_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=100, check=True
    )
    return Path(done.stdout.split()[-1])


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_in_the_objects_is_refused(train, objects_run, tmp_path, capfd, place):
    run = Path(shutil.copytree(objects_run, tmp_path / "outputs" / "objects" / "copy", symlinks=True))
    file = run / "objects_0.pkl"
    flip(file, bit=int(8 * file.stat().st_size * place))
    for command in (f"resume={run}", f"rerun={run}"):
        train(command, "trainer.max_steps=12", status=2)
        printed = capfd.readouterr().err
        assert "objects_0.pkl isn't what the run wrote" in printed
        assert "Traceback" not in printed


def test_whole_objects_are_loaded(train, objects_run, tmp_path):
    run = Path(shutil.copytree(objects_run, tmp_path / "outputs" / "objects" / "copy", symlinks=True))
    train(f"resume={run}", "trainer.max_steps=12")
    assert results.results(run)["steps"] == 12


# Rows of metrics and journals


@pytest.mark.parametrize("name", ["metrics.jsonl", "trackers/fake/journal.jsonl"])
@pytest.mark.parametrize("byte", [b"\x0c", b"\xff", b"\n"])
def test_a_damaged_byte_costs_only_its_row(train, name, byte):
    loggers = ("logger=jsonl", "+logger.fake._target_=tests.features.tracker_cases.Fake")
    stopped = (*SHORT, *loggers, "checkpoint.every_n_steps=20", "trainer.max_steps=40")
    run_dir = train(*stopped)
    file = run_dir / name
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:9] + byte + lines[2][10:]
    file.write_bytes(b"".join(lines))
    train(f"resume={run_dir}", "trainer.max_steps=60")
    log = results.log(run_dir)
    assert f"{file}: line 3 is damaged" in log
    assert " is off" not in log
    rows = file.read_bytes().splitlines(keepends=True)
    assert rows[:2] == lines[:2]
    assert rows[2 : len(lines) - 1] == lines[3:]


@pytest.mark.parametrize("place", ["trackers/fake", "trackers/fake/journal.jsonl"])
def test_logs_that_are_lost_never_end_training(train, place):
    fake = "+logger.fake._target_=tests.features.tracker_cases.Fake"
    run_dir = train(*SHORT, "logger=[jsonl,tensorboard]", fake, "checkpoint.every_n_steps=20", "trainer.max_steps=20")
    metrics = run_dir / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    lost = run_dir / place
    if lost.is_dir():
        shutil.rmtree(lost)
        lost.write_text("")
    else:
        lost.unlink()
        lost.mkdir()
    train(f"resume={run_dir}", "trainer.max_steps=40")
    assert results.results(run_dir)["steps"] == 40
    log = results.log(run_dir)
    assert log.count(f"WARNING {metrics} can't be read: Is a directory") == 1
    assert log.count(f"WARNING {run_dir}/trackers/fake/journal.jsonl can't be") == 1
    assert "earlier 0\n" in (run_dir / "fake").read_text()
    assert results.events(run_dir).Scalars("train/loss")[-1].step == 40


def test_lists_skip_a_damaged_record_and_say_so(train, run, tmp_path, capfd, monkeypatch):
    whole = train(*STOPPED)
    edit(run / "run.json", '\n  "started": "2', '\n  "started": "x')
    monkeypatch.chdir(tmp_path)
    assert compose.main(["job=runs"]) == 0
    printed = capfd.readouterr()
    assert whole.name in printed.out
    assert "outputs/toy/copy is damaged" in printed.err
    assert compose.main(["job=runs", f"runs={run}"]) == 2
