"""`job=tune` as it is typed: what it finds, prints and leaves on one process and on two, and what ends it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import cli
from framework.launch.warm import WarmServer
from tests.features.tune_cases import GROUP_RATES, HOST_BYTES, LARGEST, SAMPLE_BYTES
from tests.helpers import results

pytestmark = pytest.mark.multiproc

Train = Callable[..., Path]

CASES = "tests.features.tune_cases"
TUNE = ("job=tune", "recipe=toy")
LIMITED = (*TUNE, f"model._target_={CASES}.Limited", "tune.num_training=30", "tune.min_lr=1e-4", "data.batch_size=16")
OPTIONAL = pytest.mark.exhaustive
TWO = "topology.procs_per_node=2"


def found_in(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "tune.json").read_text())
    return content


def tried_in(found: dict[str, Any]) -> dict[int, bool]:
    return {trial["batch_size"]: trial["fits"] for trial in found["batch_size"]["trials"]}


def test_a_batch_a_rate_and_a_command_that_trains(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    typed = ("recipe=toy", "optimizer=adam", "optimizer.lr=7", "trainer.max_steps=2", "callbacks=ema")
    run_dir = train("job=tune", *typed, "tune.max_batch_size=40", "scheduler=step")
    found, printed = found_in(run_dir), capfd.readouterr().out
    batch, lr = found["batch_size"], found["lr"]
    assert (batch["batch_size"], batch["limited_by"], batch["global_batch_size"]) == (40, "tune.max_batch_size", 40)
    assert batch["together"]
    assert tried_in(found) == dict.fromkeys((2, 5, 10, 20, 40), True)
    rate = found["overrides"]["optimizer.lr"]
    assert found["overrides"] == {"data.batch_size": 40, "optimizer.lr": rate}
    assert lr["suggestion"]["begins"] < rate < lr["suggestion"]["minimum"] < 5
    (line,) = [line.strip() for line in printed.splitlines() if line.startswith("  python -m framework")]
    kept = "trainer.gpus=0 recipe=toy optimizer=adam trainer.max_steps=2 callbacks=ema scheduler=step"
    assert line == f"python -m framework {kept} data.batch_size=40 optimizer.lr={rate}"
    assert results.run_file(run_dir)["results"] == {"overrides": found["overrides"]}

    assert list(run_dir.rglob("*.pt")) == []  # nothing is kept of what was trained
    assert not (run_dir / "checkpoints").exists()
    assert (run_dir / "learning_rate.svg").read_text().startswith("<svg ")
    rows = results.rows(run_dir)
    assert [row["tune/lr"] for row in rows] == [point["lr"] for point in lr["points"]]
    assert [row["tune/loss"] for row in rows] == [point["loss"] for point in lr["points"]]
    assert list((run_dir / "tensorboard").iterdir())

    trained = train(*shlex.split(line)[3:])
    assert results.results(trained)["steps"] == 2


def test_a_global_batch_keeps_its_size(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    typed = ("data.global_batch_size=48", "trainer.accumulate_grad_batches=48")
    run_dir = train(*TUNE, *typed, "tune.max_batch_size=20", "tune.find_lr=false")
    found = found_in(run_dir)
    assert found["overrides"] == {"trainer.accumulate_grad_batches": 3}
    assert (found["batch_size"]["batch_size"], found["batch_size"]["global_batch_size"]) == (16, 48)
    assert found["lr"] is None
    assert not (run_dir / "learning_rate.svg").exists()
    assert " data.global_batch_size=48 trainer.accumulate_grad_batches=3\n" in capfd.readouterr().out


def test_if_the_loss_does_not_fall_no_rate_is_suggested(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    few = ("tune.find_batch_size=false", "tune.max_lr=1e-6", "tune.num_training=40")
    run_dir = train(*TUNE, *few, status=1)
    found, printed = found_in(run_dir), capfd.readouterr().out
    assert (found["lr"]["suggestion"], found["overrides"], len(found["lr"]["points"])) == (None, {}, 40)
    assert "No learning rate: the loss didn't fall by more than its noise." in printed
    assert "Use:" not in printed
    assert "learning_rate.svg" in printed


@OPTIONAL
def test_the_range_test_ends_with_a_loss_that_is_no_number(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    rates = ("tune.min_lr=1e4", "tune.max_lr=1e6", "tune.early_stop_threshold=null")
    found = found_in(train(*TUNE, "tune.find_batch_size=false", *rates, status=1))
    assert found["lr"]["points"][-1]["loss"] is None
    assert len(found["lr"]["points"]) < 100
    assert "and hadn't fallen before. Try lower ones: tune.min_lr" in capfd.readouterr().out


@pytest.mark.exhaustive
def test_ranks_agree_on_what_the_smallest_has_room_for(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """And the global batches that they find give the same losses in one process, but for rounding."""
    optimizer = (f"optimizer._target_={CASES}.two_rates", "tune.early_stop_threshold=null")
    run_dir = train(*LIMITED, *optimizer, TWO, "+model.most=88")
    two = found_in(run_dir)
    batch = two["batch_size"]
    assert (batch["batch_size"], batch["limited_by"], batch["global_batch_size"]) == (88, "memory", 176)
    fitting = dict.fromkeys((2, 4, 8, 16, 32, 64, 80, 88), True)
    assert tried_in(two) == fitting | {128: False, 96: False, 92: False}
    assert {trial["refused_by"] for trial in batch["trials"] if not trial["fits"]} == {1}
    assert two["overrides"]["data.batch_size"] == 88
    assert "batch 92       doesn't fit  rank 1: OutOfMemoryError: CUDA out of memory" in results.log(run_dir)
    assert f" {TWO} +model.most=88 data.batch_size=88 optimizer.lr=" in capfd.readouterr().out

    broken = f"+logger.broken._target_={CASES}.BrokenLogger"
    run_dir = train(*LIMITED, *optimizer, broken, "tune.find_batch_size=false", "data.global_batch_size=176")
    one = found_in(run_dir)
    assert one["batch_size"] is None
    losses = [[point["loss"] for point in found["lr"]["points"]] for found in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert two["lr"]["suggestion"] == pytest.approx(one["lr"]["suggestion"], rel=1e-6)

    rates = [point["lr"] for point in one["lr"]["points"]]
    assert rates == pytest.approx([1e-4 * 10 ** (5 * step / 29) for step in range(30)])
    groups = [json.loads(line) for line in GROUP_RATES.read_text().splitlines()[-30:]]
    assert groups == [pytest.approx([rate, rate / 4]) for rate in rates]
    # A logger that fails ends nothing.
    assert len(results.rows(run_dir)) == 30
    assert "logger.broken failed" in results.log(run_dir)
    assert "logger.broken can't be closed" in results.log(run_dir)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param(("+model.most=20", "+model.wrong=true"), ["ValueError: this isn't about memory"], marks=OPTIONAL),
        pytest.param(
            ("+model.most=0",),
            ["Not even a batch of 1 fits: rank 1: OutOfMemoryError", "Use a smaller model"],
            marks=OPTIONAL,
        ),
        (
            ("+model.late=true", "tune.max_batch_size=20"),
            [
                "Batches of 20 fit each process by itself, and not with the exchange of all",
                "tune.margin=0.1, or set tune.max_batch_size below 20.",
            ],
        ),
        pytest.param(
            ("+model.most=1", "+model.least=2"),
            ["Not even a batch of 2 fits: rank 1", "And with 1 the model or its data raise ValueError: Expected 2"],
            marks=OPTIONAL,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_error_ends_the_search_and_is_explained(
    train: Train, capfd: pytest.CaptureFixture[str], changes: tuple[str, ...], parts: list[str]
) -> None:
    run_dir = train(*LIMITED, TWO, *changes, status=1)
    printed = capfd.readouterr()
    assert [part for part in parts if part not in printed.err] == [], printed.err
    assert "Use:" not in printed.out
    if "+model.late=true" in changes:  # what was found before stays
        assert "Largest batch: 20" in printed.out
        assert not found_in(run_dir)["batch_size"]["together"]


@pytest.mark.exhaustive
def test_a_batch_beyond_the_hosts_memory_is_never_begun(train: Train) -> None:
    """The system would end a process, and it needn't be this one."""
    run_dir = train(*TUNE, f"model._target_={CASES}.Large", "tune.find_lr=false", "data.batch_size=4")
    batch = found_in(run_dir)["batch_size"]
    assert (batch["limited_by"], batch["room_bytes"]) == ("memory", int(HOST_BYTES * 0.9))
    most = batch["room_bytes"] // SAMPLE_BYTES
    assert most // 3 < batch["batch_size"] <= most
    assert int(LARGEST.read_text()) <= batch["batch_size"] + 1
    for trial in batch["trials"]:
        assert trial["fits"] or trial["batch_size"] > batch["batch_size"]
        assert not trial["fits"] or trial["batch_size"] * SAMPLE_BYTES < trial["peak_bytes"] <= batch["room_bytes"]


@OPTIONAL
def test_a_rank_that_hangs_in_a_trial_is_named(train: Train) -> None:
    short = ("backend.timeout=3", "backend.init_timeout=10")
    run_dir = train(*LIMITED, TWO, "+model.most=20", "+model.hangs=true", *short, status=1)
    first = json.loads((run_dir / "failure.json").read_text())["first"]
    assert (first["rank"], first["kind"]) == (1, "hung")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("-m", "seed=0,1"), ["can't go with a sweep (-m)"]),
        ((f"optimizer._target_={CASES}.without_rate", "~optimizer.lr"), ["takes no keyword lr", "tune.find_lr=false"]),
        pytest.param((f"data.datasets._target_={CASES}.stream",), ["a Stream", "one order only"], marks=OPTIONAL),
        pytest.param(("strategy=fsdp", TWO), ["strategy=fsdp", "tune.find_batch_size=false"], marks=OPTIONAL),
    ],
    ids=["sweep", "no rate", "stream", "no whole model"],
)
def test_what_cannot_be_tuned_is_refused(
    warm: WarmServer, tmp_path: Path, monkeypatch, capfd, arguments: tuple[str, ...], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TUNE, "trainer.gpus=0", *arguments], warm=warm) == 2
    printed = capfd.readouterr().err
    assert [part for part in parts if part not in printed] == [], printed
    assert list(tmp_path.rglob("*.json")) == []
