"""The command that `job=tune` gives in the end: the user's own as a training, with what was found."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.internals import Request, Topology, parse, training_command
from tests.unit.config.raw import raw_config


def given_command(typed: list[str], found: dict[str, Any], *, starter: str | None = None) -> str:
    external_ranks: Any = None if starter is None else SimpleNamespace(cluster=SimpleNamespace(starter=starter))
    raw = raw_config()
    request = Request(config=parse(raw), raw=raw, overrides=("job=tune", "tune.margin=0.2", *typed))
    return training_command(replace(request, external_ranks=external_ranks), Topology(1, 2, 0, 1), found)


@pytest.mark.parametrize(
    ("typed", "found", "expected"),
    [
        ("recipe=toy", {"data.batch_size": 64}, "recipe=toy data.batch_size=64"),
        ("optimizer.lr=1 seed=2", {"optimizer.lr": 0.5}, "seed=2 optimizer.lr=0.5"),
        ("+optimizer.lr=1", {"optimizer.lr": 0.5}, "++optimizer.lr=0.5"),
        ("optimizer=mine", {"++optimizer.lr": 0.5}, "optimizer=mine ++optimizer.lr=0.5"),
        ("~optimizer.lr", {"++optimizer.lr": 1e-05}, "++optimizer.lr=1e-05"),
        ("data.batch_size=1 data.batch_size=2", {"data.batch_size": 8}, "data.batch_size=8"),
    ],
)
def test_found_values_replace_typed_ones(typed: str, found: dict[str, Any], expected: str) -> None:
    assert given_command(typed.split(), found) == f"python -m framework {expected}"


def test_the_command_is_for_what_started_this_one() -> None:
    typed = ["recipe=toy", "optimizer.lr=3"]
    expected = "torchrun --standalone --nproc-per-node=2 -m framework recipe=toy"
    assert given_command(typed, {"optimizer.lr": 0.5}, starter="torchrun") == f"{expected} optimizer.lr=0.5"
