from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from framework.data.decoding import UndecodableError, decoded, is_known_to_repeat, sample_bytes
from framework.data.fetch import FetchRows, Request


class Given(Dataset[Any]):
    """Samples that a function makes of the index."""

    def __init__(self, make, size=300):
        self.make = make
        self.size = size
        self.asked = 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked += 1
        return self.make(index)


OWN = torch.Generator()


def batch_of(rows, indices):
    return FetchRows(rows, seed=0)(Request(torch.tensor(indices), 0))


def equal(one: Any, other: Any) -> bool:
    mine, others = tree_flatten(one), tree_flatten(other)
    pairs = zip(mine[0], others[0], strict=True)
    return mine[1] == others[1] and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.full((2, 3), i), i),
        lambda i: {"x": torch.tensor([i / 3]), "more": (i, float(i))},
        lambda i: torch.tensor(i % 200, dtype=torch.uint8),
        lambda i: (np.arange(3) + i, np.float32(i)),
    ],
)
def test_batches_are_those_of_a_data_loader(make: Any):
    dataset = Given(make)
    rows = decoded(dataset, part="train")
    assert len(rows) == 300
    indices = [299, 0, 256, 7]
    assert equal(batch_of(rows, indices), default_collate([dataset[i] for i in indices]))
    assert sample_bytes(dataset, part="train") * 300 == rows.size_bytes


def test_each_sample_is_asked_for_once_but_for_a_few():
    dataset = Given(lambda i: i)
    decoded(dataset, part="train")
    assert dataset.asked == 300 + 3


@pytest.mark.parametrize(
    "draw", [lambda: random.random(), lambda: np.random.rand(), lambda: torch.rand(1)], ids=["python", "numpy", "torch"]
)
def test_a_sample_that_draws_is_named_and_the_generators_stay(draw):
    before = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    dataset = Given(lambda i: (i, draw() if i == 270 else 0.0)[0])
    with pytest.raises(UndecodableError, match=r"Sample 270 of the val dataset draws random numbers"):
        decoded(dataset, part="val")
    assert before == (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )


def test_a_generator_of_its_own_is_seen_in_what_comes_again():
    with pytest.raises(UndecodableError, match="Sample 0 of the train dataset isn't the same"):
        decoded(Given(lambda _: torch.rand(2, generator=OWN)), part="train")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: torch.zeros(2 if i < 256 else 3), "Samples from 256 on of the train dataset differ"),
        (lambda i: torch.zeros(1 + i), "Samples 0 to 255 of the train dataset don't make a batch"),
        (lambda i: (i, "name"), "holds str"),
        (lambda _: object(), "don't make a batch: TypeError"),
    ],
)
def test_what_cannot_be_kept_is_said(make, words):
    with pytest.raises(UndecodableError, match=words):
        decoded(Given(make), part="train")


# Torchvision


@pytest.fixture
def images(own_state):
    """Data of torchvision that need no files; the same for the same transforms."""
    from torchvision.datasets import FakeData

    return lambda transform=None, **other: FakeData(12, (3, 8, 10), 4, transform=transform, **other)


def repeating():
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    normal = ([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])
    return {
        "scaled": v1.ToTensor(),
        "normal": v1.Compose([v1.ToTensor(), v1.Normalize(*normal)]),
        "resized": v1.Compose([v1.Resize(6), v1.CenterCrop(5), v1.Grayscale(), v1.ToTensor()]),
        "converted": v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(*normal)]),
        "second": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*normal)]),
    }


@pytest.mark.parametrize("name", ["scaled", "normal", "resized", "converted", "second"])
def test_images_are_kept_as_bytes_with_the_numbers_of_a_plain_loop(images, name):
    whole = images(repeating()[name])
    for dataset in (whole, Subset(whole, [11, 3, 4, 8])):
        assert is_known_to_repeat(dataset)
        rows = decoded(dataset, part="train")
        assert rows.tensors[0].dtype == torch.uint8
        assert equal(batch_of(rows, [3, 1]), default_collate([dataset[3], dataset[1]]))
    assert whole.transform is not None


def test_what_cannot_be_done_to_batches_is_kept_as_it_comes(images):
    from torchvision import transforms as v1

    dataset: Any = images(v1.Compose([v1.ToTensor(), v1.Resize(6, antialias=True)]))
    each: Any
    for each in (dataset, ConcatDataset([dataset, dataset])):
        rows = decoded(each, part="train")
        assert rows.tensors[0].dtype == torch.float32
        assert equal(batch_of(rows, [3, 1]), default_collate([each[3], each[1]]))


def test_random_and_unknown_transforms_are_not_known_to_repeat(images):
    from torchvision import transforms as v1

    assert is_known_to_repeat(images())
    for transform in (v1.RandomCrop(4), v1.Compose([v1.ToTensor(), v1.RandomErasing()]), lambda image: image):
        assert not is_known_to_repeat(images(transform))
    assert not is_known_to_repeat(images(target_transform=lambda label: label))
    assert not is_known_to_repeat(Given(lambda i: i))
    assert not is_known_to_repeat(ConcatDataset([images(), images(v1.RandomCrop(4))]))
