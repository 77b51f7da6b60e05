"""How samples are split into folds, and where the classes of a dataset are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from framework import TensorSamples
from tests.helpers.internals import class_numbers, fold_numbers

LABELS = [3, 3, 7, 3, 7, 9]
NUMBERS = [0, 0, 1, 0, 1, 2]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.data())
def test_folds_are_even_in_every_class(labels, data):
    folds = data.draw(st.integers(2, len(labels)))
    classes = torch.tensor(labels)
    numbers = fold_numbers(len(labels), folds=folds, classes=classes)
    for chosen in (torch.ones(len(labels), dtype=torch.bool), *[classes == label for label in set(labels)]):
        counts = numbers[chosen].bincount(minlength=folds)
        assert len(counts) == folds
        assert counts.max() - counts.min() <= 1
    assert torch.equal(numbers, fold_numbers(len(labels), folds=folds, classes=classes))


def test_folds_are_drawn_not_cut():
    """Data sets are often sorted."""
    numbers = fold_numbers(1000, folds=5, classes=None)
    assert numbers.bincount().tolist() == [200] * 5
    for part in numbers.split(250):
        assert part.bincount(minlength=5).min() > 25
    assert not torch.equal(numbers[:500], fold_numbers(500, folds=5, classes=None))


class Sized(SimpleNamespace, Dataset[Any]):
    """A dataset of six samples with these attributes."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, name: Any) -> Any:
        return self.columns[name]


X = torch.zeros(6, 2)
Y = torch.tensor(LABELS)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, Y),
        TensorDataset(X, X, Y.to(torch.uint8)),
        TensorSamples(X, Y.flip(0), rows=torch.arange(5, -1, -1)),
        Subset(TensorDataset(torch.zeros(8, 2), torch.tensor([1, 1, *LABELS])), range(2, 8)),
        Sized(targets=LABELS),
        Sized(targets=Y),
        Sized(labels=numpy.array(LABELS)),
        Sized(y=["a", "a", "b", "a", "b", "c"]),
        Sized(targets=[{"boxes": []}] * 6, labels=LABELS),
        Sized(column_names=["image", "label"], columns={"label": LABELS}),
        Subset(Sized(targets=LABELS[::-1]), [5, 4, 3, 2, 1, 0]),
        ConcatDataset([Subset(Sized(targets=LABELS), [0, 1]), Subset(Sized(y=Y), [2, 3, 4, 5])]),
    ],
)
def test_classes_are_found_where_datasets_have_them(dataset):
    numbers = class_numbers(dataset)
    assert numbers is not None
    assert numbers.tolist() == NUMBERS


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, torch.rand(6)),
        TensorDataset(X, torch.zeros(6, 2, dtype=torch.int64)),
        # Its only tensor may be anything, such as the place of a text's window.
        TensorSamples(Y),
        Sized(),
        Sized(y=[0.5] * 6),
        Sized(targets=[[1], [1, 2], [], [], [], []]),
        Sized(targets=LABELS[:5]),
        Sized(labels=len),
        ConcatDataset([Sized(targets=LABELS), TensorDataset(X, torch.rand(6))]),
        range(6),
    ],
)
def test_other_values_are_no_classes(dataset):
    assert class_numbers(dataset) is None
