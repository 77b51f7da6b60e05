"""`job=tune` with two processes: they agree where their memory differs, know the same loss, and fail together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

Train = Callable[..., Path]

RECIPE = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from framework import Datasets


def points(size=600):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
    return Datasets(train=TensorDataset(x, x[:, :2].tanh()))


class Model(nn.Sequential):
    '''Rank 1 has no memory for more than `most` samples at once, or mistakes them for something else.'''

    made = 0

    def __init__(self, most=1000, wrong=False, late=False):
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        Model.made += 1  # the second is that of all ranks together
        self.most, self.wrong = 0 if late and Model.made == 2 else most, wrong

    def forward(self, x):
        if os.environ.get("RANK") == "1" and len(x) > self.most:
            if self.wrong:
                raise ValueError("this isn't about memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(x)
"""
YAML = """# @package _global_
defaults:
  - override /task: regression
  - override /optimizer: adam
model: {_target_: recipes.mine.Model}
data: {datasets: {_target_: recipes.mine.points}, batch_size: 16}
"""
TUNE = ("job=tune", "recipe=mine", "tune.num_training=30", "tune.min_lr=1e-4")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(YAML)


def found_in(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "tune.json").read_text())
    return content


def test_ranks_agree_on_what_the_smallest_has_room_for(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*TUNE, "topology.procs_per_node=2", "+model.most=88")
    two = found_in(run_dir)
    batch = two["batch_size"]
    assert (batch["batch_size"], batch["limited_by"], batch["global_batch_size"]) == (88, "memory", 176)
    tried = {trial["batch_size"]: trial["fits"] for trial in batch["trials"]}
    fitting = dict.fromkeys((2, 4, 8, 16, 32, 64, 80, 88), True)
    assert tried == fitting | {128: False, 96: False, 92: False}
    assert {trial["refused_by"] for trial in batch["trials"] if not trial["fits"]} == {1}
    assert two["overrides"]["data.batch_size"] == 88
    assert "batch 92       doesn't fit  rank 1: OutOfMemoryError: CUDA out of memory" in results.log(run_dir)
    command = " topology.procs_per_node=2 +model.most=88 data.batch_size=88 optimizer.lr="
    assert command in capfd.readouterr().out

    # The same global batches in one process: the same losses, but for rounding.
    one = found_in(train(*TUNE, "tune.find_batch_size=false", "data.global_batch_size=176"))
    assert one["batch_size"] is None
    losses = [[point["loss"] for point in found["lr"]["points"]] for found in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert two["lr"]["suggestion"] == pytest.approx(one["lr"]["suggestion"], rel=1e-6)


def test_an_error_of_another_kind_is_shown_as_usual(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*TUNE, "topology.procs_per_node=2", "+model.most=20", "+model.wrong=true", status=1)
    printed = capfd.readouterr()
    assert "ValueError: this isn't about memory" in printed.err
    assert "batch 16       fits" in results.log(run_dir)
    assert "Use:" not in printed.out


def test_what_fits_alone_and_not_together_ends_the_run(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 waits in the exchange by then; the launcher ends it."""
    run_dir = train(*TUNE, "topology.procs_per_node=2", "+model.late=true", "tune.max_batch_size=20", status=1)
    out, printed = capfd.readouterr()
    assert not found_in(run_dir)["batch_size"]["together"]
    assert "Largest batch: 20" in out
    assert "Use:" not in out
    assert "Lower data.batch_size" not in printed
    assert "Batches of 20 fit each process by itself, and not with the exchange of all" in printed
    assert "Leave more room than tune.margin=0.1, or set tune.max_batch_size below 20." in printed
