"""`data.loader` and `data.num_workers`: which way data come, and that the weights are the same whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

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

class Asked(Dataset):
    def __init__(self, is_random=False):
        self.is_random = is_random

    def __len__(self):
        return 44

    def __getitem__(self, index):
        image = torch.full((1, 9, 9), index / 44)
        return (image + torch.rand(1) if self.is_random else image), index % 3

def asked():
    return Datasets(Asked())

def random():
    return Datasets(Asked(is_random=True))

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(81, 3))
"""

SHORT = (
    *(
        "recipe=digits",
        "model._target_=own.model",
        "~model.conv_dropout",
        "~model.dropout",
        "logger=none",
        "checkpoint.monitor=null",
    ),
    *("trainer.max_epochs=2", "data.global_batch_size=8", "trainer.limit_test_batches=0"),
)


def of(data: str) -> str:
    return f"data.datasets={{_target_: own.{data}}}"


def without_defaults(*keys: str) -> tuple[str, ...]:
    return tuple(f"~data.datasets.{key}" for key in keys)


GIVEN = without_defaults("size", "seed")


def log_of(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "logs" / f"rank_{rank}.log").read_text()


@pytest.fixture
def own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.multiproc
@pytest.mark.usefixtures("own")
def test_random_augmentation_gives_the_same_weights_whichever_way_data_come(train: Train) -> None:
    data = (of("augmented"), *GIVEN)
    resident = train(*SHORT, *data)
    loaded = train(*SHORT, *data, "data.loader=dataloader", "data.num_workers=1")
    assert "the train part is resident in the memory of cpu (tensors already" in log_of(resident)
    assert "the val part is loaded sample by sample by 1 worker process(es) (data.loader=dataloader)" in log_of(loaded)
    wanted, found = results.weights(resident), results.weights(loaded)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    several = train(*SHORT, *data, "topology.procs_per_node=2")
    assert "data: " not in log_of(several, rank=1)
    for name, weight in results.weights(several).items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("own")
def test_a_dataset_of_ones_own_is_resident_where_that_is_asked_for(train: Train) -> None:
    data = (of("asked"), *GIVEN)
    decoded = train(*SHORT, *data, "data.loader=resident")
    loaded = train(*SHORT, *data, "data.num_workers=0")
    assert "the train part is resident in the memory of cpu (decoded once, 0.0 MB)" in log_of(decoded)
    assert "sample by sample in this process (a Asked may give other samples each time)" in log_of(loaded)
    wanted, found = results.weights(loaded), results.weights(decoded)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.usefixtures("own")
def test_random_samples_cannot_be_resident(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    train(*SHORT, of("random"), *GIVEN, "data.loader=resident", status=2)
    answer = capfd.readouterr().err
    assert "Sample 0 of the train dataset draws random numbers" in answer
    assert "Use data.loader=dataloader, or give framework.TensorSamples" in answer


def test_workers_of_resident_data_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    from framework import cli

    assert cli.main(["recipe=toy", "data.loader=resident", "data.num_workers=2"]) == 2
    assert "data.num_workers=2 can't go with data.loader=resident" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_a_run_saved_before_there_was_a_choice_goes_on(train: Train) -> None:
    first = train("recipe=toy", "logger=none", "trainer.max_epochs=1")
    raw = yaml.safe_load((first / "config.yaml").read_text())
    del raw["data"]["loader"]
    raw["data"]["num_workers"] = 0
    (first / "config.yaml").write_text(yaml.safe_dump(raw))
    again = train(f"resume={first}", "trainer.max_epochs=2")
    assert again == first
    assert results.results(first)["epochs"] == 2
