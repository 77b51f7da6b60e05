from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from framework.data.fetch import FetchRows, FetchSamples, Request, fetch_for
from framework.data.rows import rows_of
from framework.errors import RunError


class Drawing(Dataset):
    """Samples that are drawn at random when they are asked for, from all three generators."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(3), random.random(), np.random.rand()


class Broken(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise ValueError("bad image")
        return torch.zeros(index)


def request(*indices: int, epoch: int = 0) -> Request:
    return Request(torch.tensor(indices), epoch)


@pytest.fixture
def tensors():
    return TensorDataset(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9))


def test_the_short_way_gives_what_collation_gives(tensors):
    for dataset in (tensors, Subset(tensors, [8, 3, 1, 0]), Subset(Subset(tensors, [8, 3, 1, 0]), [2, 3, 0])):
        fetch = fetch_for(dataset, part="train", seed=0)
        assert isinstance(fetch, FetchRows)
        short, long = fetch(request(2, 0, 1)), FetchSamples(dataset, part="train", seed=0)(request(2, 0, 1))
        collated = default_collate([dataset[index] for index in (2, 0, 1)])
        assert type(short) is type(long) is type(collated) is list
        for a, b, c in zip(short, long, collated, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


def test_the_short_way_is_not_for_datasets_with_a_getitem_of_their_own(tensors):
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    doubled = Doubled(*tensors.tensors)
    assert rows_of(doubled) is None
    assert rows_of(Subset(doubled, [0])) is None
    assert rows_of(Drawing()) is None
    assert isinstance(fetch_for(doubled, part="train", seed=0), FetchSamples)


def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone():
    def drawn(seed: int, epoch: int, *indices: int) -> dict[int, tuple[float, ...]]:
        index, a, b, c = FetchSamples(Drawing(), part="train", seed=seed)(request(*indices, epoch=epoch))
        return {i: (*x, y, z) for i, x, y, z in zip(*(t.tolist() for t in (index, a, b, c)), strict=True)}

    first = drawn(0, 0, 3, 4, 5)
    assert drawn(0, 0, 5)[5] == first[5]
    assert drawn(0, 0, 4, 3) == {3: first[3], 4: first[4]}
    assert len({*first.values(), drawn(0, 1, 3)[3], drawn(1, 0, 3)[3]}) == 5


def test_loading_leaves_the_generators_as_they_were():
    def states():
        return (
            random.getstate(),
            torch.get_rng_state().tolist(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
        )

    before = states()
    FetchSamples(Drawing(), part="train", seed=0)(request(1, 2))
    assert states() == before
    with pytest.raises(RunError):
        FetchSamples(Broken(), part="train", seed=0)(request(13))
    assert states() == before


def test_a_sample_that_raises_is_named():
    with pytest.raises(RunError, match=r"Sample 13 of the val dataset raised ValueError: bad image") as caught:
        FetchSamples(Broken(), part="val", seed=0)(request(13))
    assert 'in __getitem__: raise ValueError("bad image")' in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_samples_that_cannot_be_collated_are_named():
    with pytest.raises(RunError, match=r"Samples \[1, 2\] of the train dataset don't make a batch"):
        FetchSamples(Broken(), part="train", seed=0)(request(1, 2))
