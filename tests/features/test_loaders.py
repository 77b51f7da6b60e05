"""`data.loader` and `data.num_workers`: the weights are the same whichever way data come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results

Train = Callable[..., Path]

OWN = """
import torch
from torch.utils.data import Dataset
from framework import Datasets, TensorSamples, transforms

def images():
    drawn = torch.randint(256, (44, 1, 9, 9), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    every = transforms.Compose([
        transforms.RandomAffine(20, translate=(0.1, 0.1), scale=(0.8, 1.2)),
        transforms.RandomShift(1),
        transforms.RandomHorizontalFlip(),
        transforms.Normalize(0.5, 0.25),
    ])
    return TensorSamples(drawn, torch.arange(44) % 3, transform=transforms.Each(every))

def augmented():
    return Datasets(images(), images())

class OneByOne(Dataset):
    def __init__(self, is_random=False):
        self.is_random = is_random

    def __len__(self):
        return 44

    def __getitem__(self, index):
        image = torch.full((1, 9, 9), index / 44)
        return (image + torch.rand(1) if self.is_random else image), index % 3

def one_by_one():
    return Datasets(OneByOne())

def random():
    return Datasets(OneByOne(is_random=True))

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(81, 3))
"""
SHORT = (
    "recipe=digits",
    "model._target_=own.model",
    "~model.conv_dropout",
    "~model.dropout",
    "logger=none",
    "checkpoint.monitor=null",
    "trainer.max_epochs=2",
    "data.global_batch_size=8",
    "trainer.limit_test_batches=0",
    "~data.datasets.size",
    "~data.datasets.seed",
)


@pytest.fixture(autouse=True)
def _own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("data", "ways"),
    [
        (
            "augmented",
            {
                (): "data: train is resident in the memory of cpu (",
                ("data.loader=dataloader", "data.num_workers=1"): "data: train is loaded by 1 worker process(es)",
                ("topology.procs_per_node=2",): "data: val is resident",
            },
        ),
        pytest.param(
            "one_by_one",
            {
                ("data.loader=resident",): "data: train is resident in the memory of cpu (",
                ("data.num_workers=0",): "data: train is loaded in this process",
            },
            marks=pytest.mark.exhaustive,
        ),
        ("random", {("data.num_workers=0",): "in this process", ("data.num_workers=2",): "by 2 worker process(es)"}),
    ],
)
def test_every_loader_gives_the_same_weights(train: Train, data: str, ways: dict[tuple, str]) -> None:
    """Random augmentation included. Over two processes, weights differ by the order of sums only."""
    runs = {way: train(*SHORT, f"data.datasets={{_target_: own.{data}}}", *way) for way in ways}
    wanted = results.weights(next(iter(runs.values())))
    for way, run_dir in runs.items():
        assert ways[way] in results.log(run_dir)
        is_split = any("procs" in override for override in way)
        results.assert_same(results.weights(run_dir), wanted, tolerance=1e-6 if is_split else 0.0)
        assert not is_split or "data: " not in results.log(run_dir, rank=1)


def test_what_cannot_be_resident_is_refused(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    train(*SHORT, "data.datasets={_target_: own.random}", "data.loader=resident", status=2)
    said = capfd.readouterr().err
    assert "The train dataset can't be resident: it draws random numbers" in said
    assert "Use data.loader=dataloader, or give framework.TensorSamples" in said
    train("recipe=toy", "data.loader=resident", "data.num_workers=2", status=2)
    assert "data.num_workers=2 can't go with data.loader=resident" in capfd.readouterr().err
