"""What `job=tune` says in the end, and the command it gives."""

from __future__ import annotations

import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from framework.config.parse import parse
from framework.jobs.request import Request
from framework.jobs.tune import command, described, merged
from framework.topology import Topology
from tests.unit.config.raw import raw_config

BATCH = {
    "batch_size": 96,
    "limited_by": "memory",
    "margin": 0.1,
    "global_batch_size": 384,
    "accumulate_grad_batches": 2,
}
LR = {"global_batch_size": 384, "suggestion": {"lr": 0.0123, "begins": 1e-4, "minimum": 0.5}}


def asked(*overrides: str, starter: str | None = None) -> Request:
    raw = raw_config()
    leader: Any = None if starter is None else SimpleNamespace(place=SimpleNamespace(starter=starter))
    return replace(Request(config=parse(raw), raw=raw, overrides=overrides, choices={}), leader=leader)


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
    assert line.startswith("No learning rate: the loss didn't fall.")
