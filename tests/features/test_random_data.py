"""Datasets, transforms and collate functions that draw: the same on any number of workers and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results

Train = Callable[..., Path]

OWN = """
import os
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from framework import Datasets, StepOutput


class Augment:
    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, x):
        return x + self.generator.random() + random.random()


class Samples(Dataset):
    def __init__(self):
        self.transform = Augment()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(torch.full((4,), float(index)))


class LateAugment:
    '''Is applied sometimes. Makes its generator then, and another one each time.'''
    generator = None

    def __call__(self, x):
        if random.random() < 0.8:
            return x
        self.generator = random.Random(self.generator.random() if self.generator else None)
        return x + self.generator.random()


class LateSamples(Samples):
    def __init__(self):
        # Data that is larger than what is searched for generators comes before the transform.
        self.annotations = [{"boxes": [[number] for _ in range(25)]} for number in range(1000)]
        self.transforms = [Augment(), LateAugment()]

    def transform(self, x):
        for each in self.transforms:
            x = each(x)
        return x


class Stream(IterableDataset):
    def __init__(self, part=None):
        self.transform = Augment()
        self.part = part

    def shard(self, num_shards, index):
        return Stream(index)

    def __iter__(self):
        for index in range(24):
            yield self.transform(torch.full((4,), float(index)))


class Noise:
    '''A collate function that draws from a generator of its own and a global one.'''

    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self, samples):
        x = torch.stack(samples)
        return x, x * (torch.rand(x.shape, generator=self.generator) + torch.rand(1))


def data():
    return Datasets(Samples(), Samples(), collate_fn=Noise())


def late():
    return Datasets(LateSamples(), Samples(), collate_fn=Noise())


def stream():
    return Datasets(Stream(), collate_fn=Noise())


def twice():
    sampler = WeightedRandomSampler([1.0, 1.0] + [0.0] * 22, 24)
    return Datasets(DataLoader(Samples(), batch_size=12, sampler=sampler))


class Files(Dataset):
    '''As many as a file says; random in a way that can't be seeded, if there is a file that says so.'''

    def __init__(self):
        self.size = int(open("size").read())
        self.is_random = os.path.exists("random")

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.full((4,), float(index))
        return x, x + (random.SystemRandom().random() if self.is_random else 0)


def files():
    return Datasets(Files())


class Stage:
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __call__(self, x):
        return x * 0 + self.epoch


class Staged(Samples):
    def __init__(self):
        self.transform = Stage()


class StagedCollate(Stage):
    def __call__(self, samples):
        x = torch.stack(samples)
        return x, torch.full_like(x, self.epoch)


def staged():
    parts = torch.utils.data.random_split(Staged(), [16, 8])
    return Datasets(parts[0], parts[1], collate_fn=StagedCollate())


class Task:
    def training_step(self, model, batch):
        x, noisy = batch
        with open(f"drawn_{os.environ['RANK']}", "a") as file:
            file.write(f"{noisy.flatten().tolist()}\\n")
        return StepOutput((model(noisy / 30) - x / 30).square().mean(), len(x))

    def validation_step(self, model, batch):
        x, noisy = batch
        return StepOutput((model(noisy / 30) - x / 30).square().mean(), len(x))


class Count:
    '''A task that counts the different samples.'''

    def training_step(self, model, x):
        return StepOutput(model(x).mean(), len(x), {"distinct": (len(x.unique(dim=0)), 1)})

    validation_step = training_step


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)
"""
COMMON = (
    "recipe=toy",
    "model._target_=own.model",
    "task._target_=own.Task",
    "~task.loss",
    "~task.metrics",
    "~data.datasets.num_samples",
    "~data.datasets.seed",
    "data.batch_size=4",
    "trainer.max_epochs=2",
    "trainer.limit_test_batches=0",
    "trainer.num_threads=1",
    "logger=jsonl",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture(autouse=True)
def _own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)


@pytest.fixture
def drawn(train: Train, tmp_path: Path) -> Callable[..., tuple[Path, list[list[str]]]]:
    """Train; return the run and what each rank's steps got. stops: the step at which the run is stopped and resumed."""

    def drawn(*overrides: str, stops: int | None = None, ranks: int = 1) -> tuple[Path, list[list[str]]]:
        for file in tmp_path.glob("drawn_*"):
            file.unlink()
        given = (*COMMON, *overrides, f"topology.procs_per_node={ranks}")
        if stops is None:
            run = train(*given)
        else:
            part = train(*given, f"trainer.max_steps={stops}")
            run = train(f"resume={part}", "trainer.max_steps=null")
        return run, [(tmp_path / f"drawn_{rank}").read_text().splitlines() for rank in range(ranks)]

    return drawn


@pytest.mark.multiproc
def test_random_data_depend_on_neither_workers_nor_resumes(drawn):
    data = ("data.datasets._target_=own.data", "checkpoint.monitor=null")
    run, wanted = drawn(*data, "data.num_workers=0")
    assert len(set(wanted[0])) == 12
    for workers, stops in ((1, None), (2, None), (1, 8), (0, 3)):
        other, found = drawn(*data, f"data.num_workers={workers}", stops=stops)
        assert found == wanted
        results.assert_same(results.weights(other), results.weights(run))
        assert results.results(other)["last"]["metrics"] == results.results(run)["last"]["metrics"]
    _, other_seed = drawn(*data, "data.num_workers=1", "seed=1")
    assert not set(other_seed[0]) & set(wanted[0])
    _, ranks = drawn(*data, "data.num_workers=1", ranks=2)
    assert not set(ranks[0]) & set(ranks[1])


@pytest.mark.multiproc
@pytest.mark.exhaustive
def test_late_generators_and_large_data_are_seeded(drawn):
    data = ("data.datasets._target_=own.late", "checkpoint.monitor=null")
    run, wanted = drawn(*data, "data.num_workers=0")
    assert len(set(wanted[0])) == 12
    assert "can't be repeated" not in results.log(run)
    assert drawn(*data, "data.num_workers=2", stops=8)[1] == wanted


@pytest.mark.multiproc
@pytest.mark.parametrize("sharing", ["shared", "join"])
def test_random_streams_depend_on_neither_workers_nor_resumes(drawn, sharing):
    """With `join`, each process's shard has a generator of its own, in the same state."""
    data = (
        "data.datasets._target_=own.stream",
        "data.shuffle=false",
        f"data.stream={sharing}",
        "trainer.max_steps=10",
        "trainer.max_epochs=null",
        "checkpoint.monitor=null",
    )
    _, wanted = drawn(*data, "data.num_workers=0", ranks=2)
    assert len(set(wanted[0] + wanted[1])) == 20
    _, found = drawn(*data, "data.num_workers=1", ranks=2)
    assert found == wanted
    _, other_seed = drawn(*data, "data.num_workers=1", "seed=1", ranks=2)
    assert not set(other_seed[0]) & set(wanted[0])


@pytest.mark.multiproc
@pytest.mark.exhaustive
def test_a_resumed_random_stream_draws_the_same(drawn):
    data = ("data.datasets._target_=own.stream", "data.shuffle=false", "data.num_workers=0", "checkpoint.monitor=null")
    _, wanted = drawn(*data)
    for stops in (4, 9):
        assert drawn(*data, stops=stops)[1] == wanted


def test_a_repeated_sample_is_augmented_differently(train):
    given = [each for each in COMMON if not each.startswith(("task._target_", "data.batch_size"))]
    own = ("task._target_=own.Count", "data.datasets._target_=own.twice", "data.batch_size=12")
    run = train(*given, *own, "checkpoint=none")
    assert set(results.curve(run, "train/distinct").values()) == {12.0}


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", [0, 1])
def test_set_epoch_is_called_in_every_process(train, drawn, workers):
    """A transform within a dataset that training and validation share has it, and so has a collate function."""
    data = ("data.datasets._target_=own.staged", f"data.num_workers={workers}", "trainer.max_epochs=3")
    wanted = []
    for epoch in (0.0, 1.0, 2.0):
        wanted += [str([epoch] * 16)] * 4
    run, found = drawn(*data)
    assert found == [wanted]
    best = results.saved(run, "best")["training"]["val_metrics"]["val/loss"]
    evaluated = train("job=eval", "eval.part=val", f"checkpoint.path={run}/checkpoints/best")
    assert results.results(evaluated)["metrics"]["val/loss"] == best
    for stops in (4, 6, 9):
        assert drawn(*data, stops=stops)[1] == [wanted]


def test_data_that_grew_within_an_epoch_is_refused(train, tmp_path, capfd):
    (tmp_path / "size").write_text("20")
    data = ("data.datasets._target_=own.files", "checkpoint.monitor=null", "checkpoint.save_top_k=-1")
    part = train(*COMMON, *data, "trainer.max_steps=7")
    end_of_epoch = train(*COMMON, *data, "trainer.max_steps=5")
    (tmp_path / "size").write_text("24")
    train(f"resume={part}", "trainer.max_steps=null", status=2)
    said = capfd.readouterr().err
    assert "The train data is 24 samples, and was 20 samples when the checkpoint was made" in said
    assert "init_from=CHECKPOINT" in said
    assert results.results(train(f"resume={end_of_epoch}", "trainer.max_steps=null"))["steps"] == 5 + 6
    (tmp_path / "size").write_text("20")
    assert results.results(train(f"resume={part}", "trainer.max_steps=null"))["steps"] == 10


def test_a_dataset_that_cannot_be_repeated_is_named(train, tmp_path):
    (tmp_path / "size").write_text("8")
    run = train(*COMMON, "data.datasets._target_=own.files", "checkpoint=none")
    assert "can't be repeated" not in results.log(run)
    (tmp_path / "random").write_text("")
    run = train(*COMMON, "data.datasets._target_=own.files", "checkpoint=none")
    assert "The train dataset, a Files, can't be repeated: sample" in results.log(run)
    assert "at [1], differs" in results.log(run)
