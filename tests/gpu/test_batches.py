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
Runs = Callable[..., tuple[Path, Path]]
CASES = cases.__name__
TOY = ("recipe=toy", "logger=jsonl", "trainer.log_every_n_steps=1", "trainer.limit_test_batches=0")


def records(run_dir: Path, *names: str) -> list[list[Any]]:
    """Return these entries of every step that the recorder wrote."""
    lines = (run_dir / "record" / "rank_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [list(map(row.get, names)) for row in rows]


@pytest.mark.parametrize("loader", ["resident", "dataloader data.num_workers=0", "dataloader data.num_workers=2"])
def test_tensors(on_both: Runs, loader: str) -> None:
    """Resident on the GPU, and copied ahead on a side stream."""
    steps = (*TOY, *RECORDED, "trainer.max_epochs=2", *f"data.loader={loader}".split())
    there, here = on_both(*steps)
    assert records(there, "indices", "inputs") == records(here, "indices", "inputs")


def test_random_transforms_draw_as_on_the_cpu(on_both: Runs, data_root: Path) -> None:
    steps = ("recipe=mnist_fast", *TOY[1:], *RECORDED, f"data.root={data_root}", "trainer.max_steps=8")
    there, here = on_both(*steps)
    assert records(there, "inputs") == records(here, "inputs")


@pytest.mark.parametrize("kind", ["graph", "pair", "nested", "packed", "words"])
def test_batches_of_other_types_reach_the_gpu(train: Run, on_both: Runs, gpus: int, kind: str) -> None:
    """The losses of many steps: memory that is given away too early would change them."""
    data = ("~data.datasets.seed", f"data.datasets._target_={CASES}.batches", f"+data.datasets.kind={kind}")
    task = cases.task("ReadsBatches")
    steps = (*TOY, *data, *task, f"model._target_={CASES}.Reader", "trainer.max_epochs=3")
    there, here = on_both(*steps, "data.num_workers=0")
    by_workers = train(*steps, on(gpus), "data.num_workers=2")
    expected = results.curve(here, "train/loss")
    for run_dir in (there, by_workers):
        assert results.curve(run_dir, "train/loss") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream(on_both: Runs, workers: int) -> None:
    data = ("~data.datasets.num_samples", "~data.datasets.seed", f"data.datasets._target_={CASES}.stream")
    steps = (*TOY, *RECORDED, *data, "data.shuffle=false", "trainer.max_epochs=2", f"data.num_workers={workers}")
    there, here = on_both(*steps)
    # The last batch of each epoch is short.
    assert len(records(there, "inputs")) == 34
    assert records(there, "inputs") == records(here, "inputs")
