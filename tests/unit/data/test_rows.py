from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from framework import TensorSamples
from framework.data import rows as rows_module
from framework.data.fetch import FetchRows, FetchSamples, Request
from framework.data.rows import Pieces, Rows, rows_of
from framework.errors import DataError


def noisy(batch, draws):
    x, label = batch
    return [x + draws.uniform(x.shape[1]), label]


def doubled(batch, draws):
    return [2 * batch[0], batch[1]]


@pytest.fixture
def tensors():
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9)


def batch_of(dataset, *indices, seed=0, epoch=0):
    rows = rows_of(dataset)
    assert rows is not None
    return FetchRows(rows, seed=seed)(Request(torch.tensor(indices), epoch))


def test_a_sample_is_its_row_transformed(tensors):
    samples = TensorSamples(*tensors, rows=torch.tensor([8, 3, 5]), transform=doubled)
    assert len(samples) == 3
    x, label = samples[1]
    assert label == 3
    assert torch.equal(x, 2 * tensors[0][3])
    assert samples[-1][1] == 5
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"Sample {index} of 3"):
            samples[index]


def test_a_batch_is_what_the_samples_collate_to(tensors):
    samples = TensorSamples(*tensors, transform=doubled)
    for dataset in (samples, Subset(samples, [8, -1, 1, 0]), TensorSamples(*tensors)):
        short = batch_of(dataset, 2, 0, 1)
        long = FetchSamples(dataset, part="train", seed=0)(Request(torch.tensor([2, 0, 1]), 0))
        assert type(short) is list
        assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_a_subset_counts_from_the_end_as_its_dataset_does(tensors):
    _, label = batch_of(Subset(TensorDataset(*tensors), [-1, 0]), 0, 1)
    assert label.tolist() == [8, 0]


def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone(tensors):
    samples = TensorSamples(*tensors, transform=noisy)
    first = batch_of(samples, 3, 4, 5)[0]
    assert torch.equal(batch_of(samples, 5, 3)[0], first[[2, 0]])
    others = [batch_of(samples, 3, 4, 5, epoch=1)[0], batch_of(samples, 3, 4, 5, seed=1)[0]]
    assert not any(torch.equal(first, other) for other in others)


def test_a_single_sample_follows_torchs_generator(tensors, own_state):
    samples = TensorSamples(*tensors, transform=noisy)
    torch.manual_seed(1)
    first, second = samples[0][0], samples[0][0]
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(samples[0][0], first)


def test_parts_of_the_same_tensors_are_joined_without_copying_them(tensors):
    train, rest = TensorSamples(*tensors, rows=torch.tensor([1, 2])), TensorSamples(*tensors, rows=torch.tensor([7]))
    rows = rows_of(ConcatDataset([train, rest]))
    assert isinstance(rows, Rows)
    assert rows.tensors[0] is tensors[0]
    assert rows.gather(torch.arange(3))[1].tolist() == [1, 2, 7]


def test_parts_of_different_tensors_are_joined(tensors):
    parts = [TensorDataset(*tensors), Subset(TensorDataset(tensors[0] + 1, tensors[1] + 9), [4, 0])]
    joined: Any = ConcatDataset(parts)
    x, label = batch_of(joined, 10, 0, 9)
    assert label.tolist() == [9, 0, 13]
    assert torch.equal(x[0], joined[10][0])


def test_parts_of_different_tensors_are_gathered_and_copied_alike(tensors, monkeypatch):
    monkeypatch.setattr(rows_module, "_COPIED_AT_ONCE", 3 * 24)  # rows of 24 bytes
    others = TensorSamples(tensors[0] + 1, tensors[1] + 20, rows=torch.tensor([4, 0]))
    whole: Any = ConcatDataset([TensorSamples(*tensors), ConcatDataset([others, TensorSamples(*tensors)])])
    for dataset in (whole, Subset(whole, [-1, 11, 0, 10, 3])):
        pieces = rows_of(dataset)
        assert isinstance(pieces, Pieces)
        rows = pieces.copied(torch.device("cpu"))
        assert len(rows) == len(pieces) == len(dataset)
        assert rows.size_bytes == pieces.size_bytes
        every = [[sample[i] for sample in (dataset[j] for j in range(len(dataset)))] for i in range(2)]
        for copied, gathered, one_by_one in zip(
            rows.tensors, pieces.gather(torch.arange(len(dataset))), every, strict=True
        ):
            assert torch.equal(copied, torch.stack(one_by_one))
            assert torch.equal(gathered, torch.stack(one_by_one))


def test_what_parts_of_different_tensors_draw_does_not_depend_on_the_copy(tensors):
    others = TensorSamples(tensors[0].clone(), tensors[1], transform=noisy)
    pieces = rows_of(ConcatDataset([TensorSamples(*tensors, transform=noisy), others]))
    assert isinstance(pieces, Pieces)
    index, key = torch.tensor([15, 2, 5]), 7
    rows = pieces.copied(torch.device("cpu"))
    kept, loaded = (each.transformed(each.gather(index), index, key=key) for each in (rows, pieces))
    assert torch.equal(kept[0], loaded[0])
    assert not torch.equal(kept[0][0], kept[0][2])


def test_joining_copies_no_row_before_it_is_asked_to(tensors):
    pieces = rows_of(ConcatDataset([TensorDataset(*tensors), TensorDataset(tensors[0] + 1, tensors[1])]))
    assert isinstance(pieces, Pieces)
    assert isinstance(pieces.parts[0], Rows)
    assert pieces.parts[0].tensors[0] is tensors[0]


def test_unlike_parts_are_not_rows(tensors):
    plain = TensorDataset(*tensors)
    for other in (
        TensorSamples(*tensors, transform=doubled),
        TensorDataset(tensors[0].double(), tensors[1]),
        TensorDataset(tensors[0]),
    ):
        assert rows_of(ConcatDataset([plain, other])) is None


def test_only_rows_that_are_samples_go_to_a_device(tensors):
    rows = rows_of(TensorSamples(*tensors, rows=torch.tensor([1, 2])))
    assert isinstance(rows, Rows)
    moved = rows.on(torch.device("meta"))
    assert (len(moved), moved.tensors[0].shape, moved.rows) == (2, (2, 4), None)
    assert rows.on(torch.device("cpu")) is rows
    assert rows.size_bytes == 2 * 8 + 2 * (16 + 8)


@pytest.mark.parametrize("lengths", [(), (3, 4)])
def test_tensors_of_different_lengths_are_refused(lengths):
    with pytest.raises(DataError, match=f"it got {', '.join(map(str, lengths)) or 'none'}"):
        TensorSamples(*(torch.zeros(length) for length in lengths))


@pytest.mark.parametrize("wrong", [lambda b, _: [b[0][:1], b[1]], lambda b, _: b[0], lambda *_: ["x"]])
def test_a_transform_that_gives_no_row_for_each_sample_is_refused(tensors, wrong):
    with pytest.raises(DataError, match="first dimension is the sample"):
        batch_of(TensorSamples(*tensors, transform=wrong), 1, 2)
