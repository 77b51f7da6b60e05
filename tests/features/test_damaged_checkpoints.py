"""A damaged checkpoint is reported, and the run resumes from the newest whole one before it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers import results
from tests.unit.checkpoint.states import flip

SHORT = ("recipe=toy", "logger=[jsonl,tensorboard]", "trainer.limit_test_batches=0", "trainer.log_every_n_steps=5")
KEPT = ("checkpoint.monitor=null", "checkpoint.save_top_k=-1", "checkpoint.every_n_epochs=null")
THREE = (*SHORT, *KEPT, "checkpoint.every_n_steps=10")


@pytest.fixture
def run(shared_run, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10, 20 and 30, to be damaged."""
    trained = shared_run(*THREE, "trainer.max_steps=30")
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "toy" / "copy", symlinks=True))


def place(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "procs"),
    [
        ("resume={run}", 2),
        ("resume={run}/checkpoints/last", 1),
    ],
)
def test_a_run_resumes_from_the_newest_whole_checkpoint(train, run, shared_run, tmp_path, how, procs):
    """`last` names one that is damaged, or, if the link itself is typed, one that is gone."""
    if how.endswith("last"):
        shutil.rmtree(place(run, 30))
        fault = "it is gone"
    else:
        flip(place(run, 30) / "training.pt")
        fault = "training.pt has another checksum"
    (place(run, 20) / "manifest.json").unlink()
    processes = (f"topology.procs_per_node={procs}", "data.global_batch_size=20")
    train(*how.format(run=run).split(), "trainer.max_steps=40", *processes)
    log = results.log(run)
    for text in (
        f"{place(run, 30).relative_to(tmp_path)} can't be used: {fault}",
        f"{place(run, 20).relative_to(tmp_path)} can't be used: it has no manifest.json",
    ):
        assert log.count(f"WARNING The checkpoint {text}") == 1
        assert log.count(text) == 2, "printed, too"
    assert "Resuming after step 10, in epoch 0" in log
    # Damaged checkpoints are replaced when training reaches their steps again.
    assert results.saved_steps(run) == [10, 20, 30, 40]
    whole = shared_run(*THREE, "trainer.max_steps=40")
    tolerance = 0.0 if procs == 1 else 1e-6
    results.assert_same(results.weights(run), results.weights(whole), tolerance=tolerance)
    curve = results.curve(whole, "train/loss")
    assert results.curve(run, "train/loss") == {step: pytest.approx(loss, rel=1e-5) for step, loss in curve.items()}
    assert results.repeated(run) == {}
    assert [event.step for event in results.events(run).Scalars("train/loss")] == list(curve)


def test_a_run_without_whole_checkpoints_is_refused(train, run, capfd):
    damaged = ((10, "model.pt"), (20, "config.yaml"), (30, "generators.pt"))
    for step, name in damaged:
        flip(place(run, step) / name)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.parent.name != "logs"}
    train(f"resume={run}", "trainer.max_steps=40", status=2)
    printed = capfd.readouterr().err
    for step, name in damaged:
        assert f"step_{step:08d}: {name} has another checksum" in printed
    assert "Traceback" not in printed
    assert {file: file.read_bytes() for file in before} == before
    assert len(list((run / "checkpoints").glob("step_*"))) == 3
