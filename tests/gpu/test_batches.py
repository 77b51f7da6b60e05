"""What a dataset, a stream or a collate function makes reaches the GPU as it is on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import cases
from tests.gpu.cases import RECORDED, on
from tests.helpers import results

Run = Callable[..., Path]
CASES = cases.__name__
TOY = ("recipe=toy", "logger=jsonl", "trainer.log_every_n_steps=1", "trainer.limit_test_batches=0")


def records(run_dir: Path, *names: str) -> list[list[Any]]:
    """Return these entries of every step that the recorder wrote."""
    lines = (run_dir / "record" / "rank_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [list(map(row.get, names)) for row in rows]


@pytest.mark.parametrize("loader", ["resident", "dataloader data.num_workers=0", "dataloader data.num_workers=2"])
def test_tensors(train: Run, gpus: int, loader: str) -> None:
    """Resident on the GPU, and copied ahead on a side stream."""
    steps = (*TOY, *RECORDED, "trainer.max_epochs=2", *f"data.loader={loader}".split())
    there = records(train(*steps, on(gpus)), "indices", "inputs")
    assert there == records(train(*steps, on(0)), "indices", "inputs")


def test_random_transforms_draw_as_on_the_cpu(train: Run, gpus: int, data_root: Path) -> None:
    steps = ("recipe=mnist_fast", *TOY[1:], *RECORDED, f"data.root={data_root}", "trainer.max_steps=8")
    there = records(train(*steps, on(gpus)), "inputs")
    assert there == records(train(*steps, on(0)), "inputs")


@pytest.mark.parametrize("kind", ["graph", "pair", "nested", "packed", "words"])
def test_batches_of_other_types_reach_the_gpu(train: Run, gpus: int, kind: str) -> None:
    """The losses of many steps: memory that is given away too early would change them."""
    data = ("~data.datasets.seed", f"data.datasets._target_={CASES}.batches", f"+data.datasets.kind={kind}")
    task = cases.task("ReadsBatches")
    steps = (*TOY, *data, *task, f"model._target_={CASES}.Reader", "trainer.max_epochs=3")
    expected = results.curve(train(*steps, on(0), "data.num_workers=0"), "train/loss")
    for workers in (0, 2):
        found = results.curve(train(*steps, on(gpus), f"data.num_workers={workers}"), "train/loss")
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream(train: Run, gpus: int, workers: int) -> None:
    data = ("~data.datasets.num_samples", "~data.datasets.seed", f"data.datasets._target_={CASES}.stream")
    steps = (*TOY, *RECORDED, *data, "data.shuffle=false", "trainer.max_epochs=2", f"data.num_workers={workers}")
    there = records(train(*steps, on(gpus)), "inputs")
    # The last batch of each epoch is short.
    assert len(there) == 34
    assert there == records(train(*steps, on(0)), "inputs")
