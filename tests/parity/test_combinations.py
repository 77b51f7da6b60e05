"""Every strategy with every number format, accumulation, clipping and recomputing: 20 steps end as one process does.

Or, for those that are approximate, near it; and local_sgd where its rule does. Of MNIST's images too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.launch.warm import WarmServer
from recipes.digits import digits
from recipes.mnist import mnist
from tests.conftest import DATA_VARIABLE
from tests.helpers.ranks import left_by_ranks
from tests.multiproc.combination_entries import ASKED, HOWS, IMAGES, Asked

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
Check = Callable[..., None]

TOLERANCE = {"32-true": 1e-6, "bf16-mixed": 1e-3, "16-mixed": 1e-4, "bf16-true": 2e-2, "64-true": 1e-13}
"""Of the greatest weight. What is computed in a short format is rounded anew in each part of a batch."""
OF_IMAGES = {"32-true": 1e-3, "64-true": 1e-11}
"""In 20 steps the network's kinks make much of the order in which pixels were added."""
ROUNDED = {"ddp fp16": 1e-3, "ddp bf16": 1e-2, "ddp powersgd": 0.2}
EXACT = ("ddp", "ddp butterfly", "allreduce", "butterfly", "fsdp", "hsdp", "pipeline", "pipelines")
REFUSED = {"local_sgd", "ddp powersgd", "pipeline", "pipelines"}
"""With 16-mixed, for several processes."""

FEW = (
    Asked("64-true", ("butterfly", "fsdp", "pipeline", "local_sgd")),
    Asked("bf16-mixed", ("pipeline", "local_sgd")),
    Asked("32-true", ("pipeline",), compiles=True),
    Asked("64-true", ("allreduce", "fsdp", "pipeline"), images=True),
)
"""In one go: each launch costs as much as many of them."""
CAPTURED = Asked(
    "32-true", ("ddp", "ddp butterfly", "allreduce", "fsdp", "hsdp", "pipelines", "local_sgd"), compiles=True
)
ALL = (*map(Asked, HOWS), Asked("32-true", EXACT, images=True), Asked("64-true", EXACT, images=True))


@pytest.fixture
def check(warm: WarmServer, tmp_path: Path) -> Check:
    """Trains on so many ranks and compares."""

    def call(asked: Asked, procs: int, left: dict[str, Any]) -> None:
        refused = set() if asked.kind != "16-mixed" else REFUSED if procs > 1 else {"ddp powersgd"}
        tolerance = (OF_IMAGES if asked.images else TOLERANCE)[asked.kind]
        assert left
        for name, found in left.items():
            assert isinstance(found, str) == (name in refused), (asked, name, found)
            if name not in refused:
                off, moved = found
                assert off <= max(tolerance, ROUNDED.get(name, 0.0)), (asked, name, found)
                assert moved > 0.01, (asked, name, found)

    def run(procs: int, every: tuple[Asked, ...]) -> None:
        (tmp_path / ASKED).write_text(json.dumps(every))
        entry = "tests.multiproc.combination_entries:train_all"
        for of_rank in left_by_ranks(entry, procs=procs, warm=warm, folder=tmp_path):
            for asked, left in zip(every, of_rank, strict=True):
                call(asked, procs, left)

    return run


@pytest.fixture
def images(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """MNIST's first ones, where its files are; else those that scikit-learn has."""
    if os.environ.get(DATA_VARIABLE):
        train: Any = mnist(str(request.getfixturevalue("data_root")), mirrors=[]).train
    else:
        train = digits().train
    images, labels = zip(*(train[index] for index in range(70)), strict=True)
    torch.save((torch.stack(images), torch.tensor(labels)), tmp_path / IMAGES)


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize(
    ("procs", "every"),
    [
        pytest.param(2, FEW, id="2"),
        *(
            pytest.param(procs, (asked,), marks=pytest.mark.exhaustive, id=f"{procs}-{asked.kind}-{asked.images}")
            for asked in ALL
            for procs in (1, 2, 3, 4)
        ),
        pytest.param(4, (CAPTURED,), marks=pytest.mark.exhaustive, id="4-captured"),
    ],
)
def test_they_end_as_one_process(check: Check, procs: int, every: tuple[Asked, ...]) -> None:
    check(procs, every)
