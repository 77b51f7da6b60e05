"""`job=tune` as it is typed, with one process: what it finds, prints and leaves, and that its command trains."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import cli
from framework.launch.warm import WarmServer
from tests.helpers import results

pytestmark = pytest.mark.multiproc

Train = Callable[..., Path]


def found_in(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "tune.json").read_text())
    return content


def test_a_batch_a_rate_and_a_command_that_trains(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    typed = ("recipe=toy", "optimizer=adam", "optimizer.lr=7", "trainer.max_steps=2", "callbacks=ema")
    run_dir = train("job=tune", *typed, "tune.max_batch_size=40", "scheduler=step")
    found, printed = found_in(run_dir), capfd.readouterr().out
    batch, lr = found["batch_size"], found["lr"]
    assert (batch["batch_size"], batch["limited_by"], batch["global_batch_size"]) == (40, "tune.max_batch_size", 40)
    assert batch["together"]
    assert [trial["batch_size"] for trial in batch["trials"] if trial["fits"]] == [2, 5, 10, 20, 40]
    assert (lr["global_batch_size"], len(lr["points"]) <= 100) == (40, True)
    rate = found["overrides"]["optimizer.lr"]
    assert found["overrides"] == {"data.batch_size": 40, "optimizer.lr": rate}
    assert 1e-5 < rate < 5
    (line,) = [line.strip() for line in printed.splitlines() if line.startswith("  python -m framework")]
    kept = "trainer.gpus=0 recipe=toy optimizer=adam trainer.max_steps=2 callbacks=ema scheduler=step"
    assert line == f"python -m framework {kept} data.batch_size=40 optimizer.lr={rate}"
    assert "  Found without the schedule" in printed
    # Nothing is kept of what was trained.
    assert list(run_dir.rglob("*.pt")) == []
    assert not (run_dir / "checkpoints").exists()
    assert results.run_file(run_dir)["status"] == "finished"
    assert (run_dir / "learning_rate.svg").read_text().startswith("<svg ")
    rows = results.rows(run_dir)
    assert [row["tune/lr"] for row in rows] == [point["lr"] for point in lr["points"]]
    assert rows[0]["tune/loss"] == lr["points"][0]["loss"]
    assert list((run_dir / "tensorboard").iterdir())

    trained = train(*shlex.split(line)[3:])
    assert results.results(trained)["steps"] == 2


def test_a_global_batch_stays_what_it_is(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    typed = ("recipe=toy", "data.global_batch_size=48", "trainer.accumulate_grad_batches=48")
    run_dir = train("job=tune", *typed, "tune.max_batch_size=20", "tune.find_lr=false")
    found = found_in(run_dir)
    assert found["overrides"] == {"trainer.accumulate_grad_batches": 3}
    assert (found["batch_size"]["batch_size"], found["batch_size"]["global_batch_size"]) == (16, 48)
    assert found["lr"] is None
    assert not (run_dir / "learning_rate.svg").exists()
    assert " data.global_batch_size=48 trainer.accumulate_grad_batches=3\n" in capfd.readouterr().out


def test_where_no_rate_helps_none_is_given(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    few = ("tune.find_batch_size=false", "tune.max_lr=1e-6", "tune.num_training=40")
    run_dir = train("job=tune", "recipe=toy", *few, status=1)
    found, printed = found_in(run_dir), capfd.readouterr().out
    assert (found["lr"]["suggestion"], found["overrides"], len(found["lr"]["points"])) == (None, {}, 40)
    assert "No learning rate: the loss didn't fall by more than its noise." in printed
    assert "Use:" not in printed
    assert "learning_rate.svg" in printed


def test_a_sweep_is_refused(
    warm: WarmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["job=tune", "recipe=toy", "trainer.gpus=0", "-m", "seed=0,1"], warm=warm) == 2
    assert "can't go with a sweep (-m)" in capfd.readouterr().err
    assert list(tmp_path.rglob("*.json")) == []
