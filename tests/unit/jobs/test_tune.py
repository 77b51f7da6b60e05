"""What `job=tune` says in the end, and the command it gives."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.config.parse import parse
from framework.jobs import tune
from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words
from framework.jobs.tune import command, described, merged
from framework.run_dir import create_run_dir
from framework.topology import Topology
from tests.unit.config.raw import raw_config

BATCH = {
    "batch_size": 96,
    "limited_by": "memory",
    "margin": 0.1,
    "global_batch_size": 384,
    "accumulate_grad_batches": 2,
    "together": True,
}
LR = {
    "global_batch_size": 384,
    "stopped": None,
    "suggestion": {"lr": 0.0123, "begins": 1e-4, "minimum": 0.5},
    "points": [{"lr": 1e-7, "loss": 1.0, "smoothed": 1.0}] * 2,
}


def asked(*overrides: str, starter: str | None = None) -> Request:
    raw = raw_config()
    leader: Any = None if starter is None else SimpleNamespace(place=SimpleNamespace(starter=starter))
    return replace(Request(config=parse(raw), raw=raw, overrides=overrides), leader=leader)


@pytest.mark.parametrize(
    ("typed", "found", "expected"),
    [
        (["recipe=toy"], {"data.batch_size": 64}, ["recipe=toy", "data.batch_size=64"]),
        (["optimizer.lr=1", "seed=2"], {"optimizer.lr": 0.5}, ["seed=2", "optimizer.lr=0.5"]),
        (["optimizer={lr:1}"], {"optimizer.lr": 0.5}, ["optimizer={lr:1}", "optimizer.lr=0.5"]),
        (["+optimizer.lr=1"], {"optimizer.lr": 0.5}, ["+optimizer.lr=0.5"]),
        (["optimizer=mine"], {"+optimizer.lr": 0.5}, ["optimizer=mine", "+optimizer.lr=0.5"]),
        (["~optimizer.lr"], {"+optimizer.lr": 1e-05}, ["+optimizer.lr=1e-05"]),
        (["data.batch_size=1", "data.batch_size=2"], {"data.batch_size": 8}, ["data.batch_size=8"]),
    ],
)
def test_what_was_typed_is_kept(typed: list[str], found: dict[str, Any], expected: list[str]) -> None:
    assert list(merged(typed, found)) == expected


TYPED = ("job=tune", "recipe=toy", "tune.margin=0.2", "launcher=local", "optimizer.lr=3")


@pytest.mark.parametrize(
    ("starter", "expected"),
    [
        (None, "python -m framework recipe=toy optimizer.lr=0.5 launcher=local"),
        ("torchrun", "torchrun --standalone --nproc-per-node=2 -m framework recipe=toy optimizer.lr=0.5"),
        ("srun", "srun --nodes=1 --ntasks-per-node=2 python -m framework recipe=toy optimizer.lr=0.5"),
        ("Kubernetes", "python -m framework recipe=toy optimizer.lr=0.5"),
    ],
)
def test_the_command_is_the_users_own_as_a_training(starter: str | None, expected: str) -> None:
    request = asked(*TYPED, starter=starter)
    assert command(request, Topology(1, 2, 0, 1), {"optimizer.lr": 0.5}) == expected
    assert shlex.split(expected)


def test_findings() -> None:
    lines = list(described({"batch_size": BATCH, "lr": LR}, scheduled=True))
    assert lines == [
        "Largest batch: 96 for each process (by memory, of which 10% is left alone); a step takes 384 samples, "
        "2 passes",
        "Learning rate: 0.012 for steps of 384 samples, where the loss falls fastest",
        "  It falls from 0.0001 to 0.5; a tenth of the latter is more careful: 0.05",
        "  Found without the schedule, which begins at it or leads up to it",
    ]


def test_what_limits_a_batch_is_named() -> None:
    by_key = BATCH | {"limited_by": "tune.max_batch_size", "accumulate_grad_batches": 1}
    assert list(described({"batch_size": by_key, "lr": None}, scheduled=True)) == [
        "Largest batch: 96 for each process (as much as tune.max_batch_size allows); a step takes 384 samples"
    ]
    (line,) = described({"batch_size": BATCH | {"limited_by": "data"}, "lr": None}, scheduled=False)
    assert "(more would be more than all samples in a step)" in line


def test_without_a_rate_it_says_what_to_do() -> None:
    (line,) = described({"batch_size": None, "lr": LR | {"suggestion": None}}, scheduled=True)
    assert line.startswith("No learning rate: the loss didn't fall by more than its noise. Look at the plot")
    risen = LR | {"suggestion": None, "stopped": "the loss had risen to 9 at 0.1, from 2"}
    (line,) = described({"batch_size": None, "lr": risen}, scheduled=True)
    assert "its noise (the loss had risen to 9 at 0.1, from 2). Look" in line


@pytest.mark.parametrize(
    ("before", "hint"),
    [(0, ", with the initial weights. Look at the model and the data"), (3, ", and hadn't fallen before. Try lower")],
)
def test_a_loss_that_is_no_number_is_said(before: int, hint: str) -> None:
    points = [{"lr": 1e-7, "loss": 1.0, "smoothed": 1.0}] * before + [{"lr": 1e-6, "loss": None, "smoothed": None}]
    lr = LR | {"suggestion": None, "stopped": "the loss was nan at 1e-06", "points": points}
    (line,) = described({"batch_size": None, "lr": lr}, scheduled=True)
    assert line.startswith(f"No learning rate: the loss was nan at 1e-06{hint}")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Words:
    """What `main` has the run say."""
    kept: list[Words] = []

    def run(_request: Request, *, entry: str, words: Words) -> JobResult:
        kept.append(words)
        return JobResult(1, None)

    monkeypatch.setattr(tune, "run", run)
    monkeypatch.setattr(tune, "check", lambda _: Topology(1, 1, 0, 1))
    tune.main(asked(*TYPED))
    return kept[0]


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_outlives_what_fails_after_it(words: Words, tmp_path: Path, together: bool) -> None:
    run_dir, config = create_run_dir(tmp_path), parse(raw_config())
    assert "nothing to go on from" in words.interrupted(run_dir)
    batch = BATCH | {"together": together}
    found = {"batch_size": batch, "lr": None, "overrides": {"data.batch_size": 96}}
    (run_dir.path / "tune.json").write_text(json.dumps(found))
    for text in (words.closing(config, run_dir, 1), words.interrupted(run_dir)):
        assert "Largest batch: 96" in text
        assert ("python -m framework recipe=toy optimizer.lr=3 " in text) is together
        assert ("by itself; all together haven't yet" in text) is not together
        assert not {"plot", "look"} & set(text.split())


def test_curves_are_shown_where_there_are_some(words: Words, tmp_path: Path) -> None:
    run_dir, config = create_run_dir(tmp_path), parse(raw_config())
    (run_dir.path / "learning_rate.svg").touch()
    assert "tensorboard" not in words.closing(config, run_dir, 0)
    run_dir.tensorboard.mkdir()
    assert "tensorboard --logdir" in words.closing(config, run_dir, 0)
