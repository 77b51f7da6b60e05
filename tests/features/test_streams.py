"""A stream through the command: trained by two processes, resumed, predicted; and an error in it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results

Train = Callable[..., Path]

OWN = """
import torch
from torch.utils.data import IterableDataset
from framework import Datasets

class Numbers(IterableDataset):
    def __init__(self, lengths, fails=False, only=None):
        self.lengths, self.fails, self.only = list(lengths), fails, only

    def shard(self, num_shards, index):
        assert num_shards == len(self.lengths)
        return Numbers(self.lengths, self.fails, index)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for part in range(len(self.lengths)) if self.only is None else [self.only]:
            for number in range(self.lengths[part]):
                if self.fails and self.only == 1 and number == 9:
                    raise OSError("the connection is gone")
                x = torch.tensor([part + 1.0, number / 10, torch.rand(()).item()])
                yield x, x.sum()

def data(fails=False):
    return Datasets(Numbers([21, 10], fails), Numbers([5, 4]), Numbers([7, 4]))

class Task:
    def training_step(self, model, batch):
        from framework import StepOutput
        x, y = batch
        return StepOutput((model(x).squeeze(1) - y).square().mean(), len(y))
    validation_step = training_step
    def predict_step(self, model, batch):
        return batch[0][:, 0] * 100 + batch[0][:, 1] * 10

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
"""
COMMON = (
    "recipe=toy",
    "model._target_=own.model",
    "task._target_=own.Task",
    "~task.loss",
    "~task.metrics",
    "data.datasets._target_=own.data",
    "~data.datasets.num_samples",
    "~data.datasets.seed",
    "data.shuffle=false",
    "data.batch_size=2",
    "logger=none",
    "trainer.num_threads=1",
)
TWO = ("topology.procs_per_node=2", "data.stream=join", "trainer.accumulate_grad_batches=2")


@pytest.fixture(autouse=True)
def _own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.multiproc
def test_uneven_streams_train_resume_and_predict(train: Train, tmp_path: Path) -> None:
    """An epoch has six steps; after the third, the second process has nothing left."""
    keep = ("checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1", "checkpoint.monitor=null")
    run = train(*COMMON, *TWO, *keep, "trainer.max_epochs=2")
    found = results.results(run)
    assert (found["steps"], found["epochs"]) == (12, 2)
    assert results.metrics(run).keys() == {"val/loss", "test/loss"}
    wanted = results.weights(run)
    train(f"resume={run}/checkpoints/step_00000008")
    results.assert_same(results.weights(run), wanted)

    shared = ("data.stream=shared", "data.eval_batch_size=2")
    train("job=predict", f"checkpoint.path={run}", *shared, "predict.output=out.csv")
    rows = list(csv.reader((tmp_path / "out.csv").read_text().splitlines()))[1:]
    assert [round(float(row[1])) for row in rows] == [*range(100, 107), *range(200, 204)]


LENGTH = """
class Length:
    def on_fit_start(self, info): print("length", info.start_step, info.total_steps, info.steps_left_in_epoch)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("reading", ["data.stream=join", "data.num_workers=2"])
def test_short_windows_count_as_steps_of_a_limited_epoch(train: Train, tmp_path: Path, reading: str) -> None:
    """Some of the 9 steps of an epoch have fewer samples than a global batch, since the second shard is shorter."""
    (tmp_path / "length.py").write_text(LENGTH)
    limited = ("trainer.limit_train_batches=9", "trainer.max_epochs=2", "scheduler=cosine", reading)
    both = (*COMMON, *limited, "topology.procs_per_node=2", "+callbacks.length._target_=length.Length")
    whole = train(*both)
    assert results.results(whole)["steps"] == 18
    stopped = train(*both, "+trainer.max_steps=7", "scheduler.total_steps=18")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null", "scheduler.total_steps=null")
    results.assert_same(results.weights(resumed), results.weights(whole))
    lengths = [line for line in results.log(resumed).splitlines() if line.startswith("length")]
    assert lengths == ["length 0 7 None", "length 7 18 2"]


@pytest.mark.multiproc
def test_an_error_in_one_stream_names_its_process(train: Train) -> None:
    run = train(*COMMON, *TWO, "+data.datasets.fails=true", status=1)
    report = json.loads((run / "failure.json").read_text())
    assert report["first"]["rank"] == 1
    sample = "Sample 9 of shard 1 of 2 of the train stream, in epoch 0,"
    assert f"{sample} raised OSError: the connection is gone" in json.dumps(report)


@pytest.mark.multiproc
def test_a_stream_passes_over_the_samples_of_skipped_steps(train: Train, tmp_path: Path) -> None:
    """Resumed between two of them. Deferring is refused: samples come once."""
    keep = ("checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1", "checkpoint.monitor=null")
    skipping = ("data.skip_steps=[2,4,6,9]", "trainer.max_epochs=2")
    run = train(*COMMON, *TWO, *keep, *skipping)
    assert results.results(run)["steps"] == 8
    wanted = results.weights(run)
    train(f"resume={run}/checkpoints/step_00000002")
    results.assert_same(results.weights(run), wanted)
    train(*COMMON, "data.defer_steps=[2]", status=2)
