"""`job=tune` as it is typed: what it finds, prints and leaves on one process and on two, and what ends it."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.internals import ForkServer, compose

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


def test_tune_finds_batch_rate_and_a_working_command(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    typed = ("recipe=toy", "optimizer=adam", "optimizer.lr=7", "trainer.max_steps=2", "callbacks=ema")
    run_dir = train("job=tune", *typed, "tune.max_batch_size=40", "scheduler=step")
    found = found_in(run_dir)
    printed = capfd.readouterr().out
    batch = found["batch_size"]
    lr = found["lr"]
    assert (batch["batch_size"], batch["limited_by"], batch["global_batch_size"]) == (40, "tune.max_batch_size", 40)
    # The forecast says that it fits.
    assert tried_in(found) == {40: True}
    assert [size for size, _ in found["forecast"]["points"]][:2] == [8, 64]
    rate = found["overrides"]["optimizer.lr"]
    assert found["overrides"] == {"data.batch_size": 40, "optimizer.lr": rate}
    assert lr["suggestion"]["begins"] < rate < lr["suggestion"]["minimum"] < 5
    (line,) = [line.strip() for line in printed.splitlines() if line.startswith("  python -m framework")]
    kept = "trainer.gpus=0 recipe=toy optimizer=adam trainer.max_steps=2 callbacks=ema scheduler=step"
    assert line == f"python -m framework {kept} data.batch_size=40 optimizer.lr={rate}"
    assert results.run_file(run_dir)["results"] == {"overrides": found["overrides"]}

    # Nothing that was trained is kept.
    assert list(run_dir.rglob("*.pt")) == []
    assert not (run_dir / "checkpoints").exists()
    if importlib.util.find_spec("matplotlib") is None:
        assert "No learning_rate.svg: it needs `pip install framework[plot]`" in printed
    else:
        assert "<svg " in (run_dir / "learning_rate.svg").read_text()

    trained = train(*shlex.split(line)[3:])
    assert results.results(trained)["steps"] == 2


@pytest.mark.exhaustive
def test_a_global_batch_keeps_its_size(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    typed = ("data.global_batch_size=48", "trainer.accumulate_grad_batches=48")
    run_dir = train(*TUNE, *typed, "tune.max_batch_size=20", "tune.find_lr=false")
    found = found_in(run_dir)
    assert found["overrides"] == {"trainer.accumulate_grad_batches": 3}
    assert (found["batch_size"]["batch_size"], found["batch_size"]["global_batch_size"]) == (16, 48)
    assert found["lr"] is None
    assert not (run_dir / "learning_rate.svg").exists()
    assert " data.global_batch_size=48 trainer.accumulate_grad_batches=3\n" in capfd.readouterr().out


def test_no_rate_is_suggested_without_a_falling_loss(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    few = ("tune.find_batch_size=false", "tune.max_lr=1e-6", "tune.num_training=40")
    run_dir = train(*TUNE, *few, status=1)
    found = found_in(run_dir)
    printed = capfd.readouterr().out
    assert (found["lr"]["suggestion"], found["overrides"], len(found["lr"]["points"])) == (None, {}, 40)
    assert "No learning rate: the loss didn't fall by more than its noise." in printed
    assert "Use:" not in printed
    # The plot shows the reason, or what it needs.
    assert "learning_rate.svg" in printed


def test_without_a_forecast_the_batch_is_doubled(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    values = f"model._target_={CASES}.NeedsValues"
    run_dir = train(*TUNE, values, "tune.max_batch_size=40", "tune.find_lr=false")
    found = found_in(run_dir)
    assert tried_in(found) == dict.fromkeys((2, 4, 8, 16, 32, 40), True)
    assert found["overrides"] == {"data.batch_size": 40}
    printed = capfd.readouterr().out
    assert "The search doubles the batch, without a forecast: the step needs the values of tensors\n" in printed


def test_a_global_batch_is_recomputed_if_that_is_faster(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    blocks = (f"model._target_={CASES}.Blocks", "data.global_batch_size=64", "tune.find_lr=false")
    found = found_in(train(*TUNE, *blocks))
    plain, recomputing = found["batch_size"]["proposals"]
    assert plain["overrides"] == {"trainer.accumulate_grad_batches": 8}
    chosen = {"trainer.accumulate_grad_batches": 2, "trainer.activation_checkpointing": "auto"}
    assert found["overrides"] == recomputing["overrides"] == chosen
    printed = capfd.readouterr().out
    typed = "trainer.accumulate_grad_batches=2 trainer.activation_checkpointing=auto"
    assert f" data.global_batch_size=64 {typed}\n" in printed
    assert f"samples/s with micro-batches of 32: {typed}\n" in printed


@pytest.mark.exhaustive
def test_ranks_agree_on_the_smallest_room(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """In one process the global batch that they find gives the same losses, up to rounding."""
    adam = "optimizer=adam"
    early = "tune.early_stop_threshold=null"
    run_dir = train(*LIMITED, adam, early, TWO, "+model.most=88")
    two = found_in(run_dir)
    batch = two["batch_size"]
    assert (batch["batch_size"], batch["limited_by"], batch["global_batch_size"]) == (88, "memory", 176)
    # The forecast knows nothing of this limit.
    too_large = dict.fromkeys((800, 128, 96, 92), False)
    assert tried_in(two) == dict.fromkeys((2, 4, 8, 16, 32, 64, 80, 88), True) | too_large
    assert {trial["refused_by"] for trial in batch["trials"] if not trial["fits"]} == {1}
    assert two["overrides"]["data.batch_size"] == 88
    assert "batch 92       doesn't fit  rank 1: OutOfMemoryError: CUDA out of memory" in results.log(run_dir)
    assert f" {TWO} +model.most=88 data.batch_size=88 optimizer.lr=" in capfd.readouterr().out

    run_dir = train(*LIMITED, adam, early, "tune.find_batch_size=false", "data.global_batch_size=176")
    one = found_in(run_dir)
    assert one["batch_size"] is None
    losses = [point["loss"] for point in two["lr"]["points"]]
    assert losses == pytest.approx([point["loss"] for point in one["lr"]["points"]], rel=1e-4)
    assert two["lr"]["suggestion"] == pytest.approx(one["lr"]["suggestion"], rel=1e-6)


def test_a_sharded_model_is_tried_by_each_process_alone(train: Train) -> None:
    """Out of memory in the middle of a step, a rank leaves nobody waiting; afterwards the ranks train together."""
    exchanging = (*LIMITED, f"model._target_={CASES}.Exchanging", "+model.most=20", "trainer.gradient_clip_val=0.1")
    sharded = (*exchanging, "strategy=fsdp", TWO)
    two = found_in(train(*sharded, "tune.max_batch_size=24"))
    assert two["overrides"]["data.batch_size"] == 20
    assert {trial["refused_by"] for trial in two["batch_size"]["trials"] if not trial["fits"]} == {1}

    rates = found_in(train(*sharded, "tune.find_batch_size=false", "data.batch_size=20"))
    assert two["lr"] == rates["lr"]


def test_the_rank_with_less_memory_decides(train: Train) -> None:
    roomy = (f"model._target_={CASES}.Roomy", "strategy=fsdp", TWO, "tune.find_lr=false")
    found = found_in(train(*TUNE, *roomy))
    batch = found["batch_size"]
    assert batch["limited_by"] == "memory"
    assert len([trial for trial in batch["trials"] if trial["peak_bytes"] is not None]) <= 6
    assert {trial["refused_by"] for trial in batch["trials"] if not trial["fits"]} == {1}
    (largest,) = [trial for trial in batch["trials"] if trial["batch_size"] == batch["batch_size"]]
    # Rank 1 has half of 300 MiB, of which a tenth stays free; rank 0 has more, and its peak may be higher.
    assert 80 << 20 < largest["peak_bytes"] < 160 << 20


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param(("+model.most=20", "+model.wrong=true"), ["ValueError: this isn't about memory"], marks=OPTIONAL),
        pytest.param(
            ("+model.most=20", "+model.wrong=true", "strategy=fsdp"),
            ["ValueError: this isn't about memory"],
            marks=OPTIONAL,
        ),
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_error_ends_the_search_and_is_explained(
    train: Train, capfd: pytest.CaptureFixture[str], changes: tuple[str, ...], parts: list[str]
) -> None:
    train(*LIMITED, TWO, *changes, status=1)
    printed = capfd.readouterr()
    assert [part for part in parts if part not in printed.err] == [], printed.err
    assert "Use:" not in printed.out
    if "+model.late=true" in changes:
        # Earlier results stay.
        assert "Largest batch: 20" in printed.out


STREAM = "data.datasets._target_=tests.unit.fake_targets.stream"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("-m", "seed=0,1"), ["can't go with a sweep (-m)"]),
        ((f"optimizer._target_={CASES}.without_rate", "~optimizer.lr"), ["takes no keyword lr", "tune.find_lr=false"]),
        (
            (STREAM, "data.shuffle=false", "~data.datasets.num_samples", "~data.datasets.seed"),
            ["IterableDataset", "Tune with some of its"],
        ),
        pytest.param(("strategy=pipeline", TWO), ["strategy=pipeline", "tune.find_batch_size=false"], marks=OPTIONAL),
    ],
    ids=["sweep", "no rate", "stream", "stages"],
)
def test_what_cannot_be_tuned_is_refused(
    fork_server: ForkServer, tmp_path: Path, monkeypatch, capfd, arguments: tuple[str, ...], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose.main([*TUNE, "trainer.gpus=0", *arguments], fork_server=fork_server) == 2
    printed = capfd.readouterr().err
    assert [part for part in parts if part not in printed] == [], printed
    assert list(tmp_path.rglob("*.json")) == []
