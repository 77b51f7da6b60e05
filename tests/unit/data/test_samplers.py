"""Orders of an epoch: what each sampler draws, where its weights come from, and which it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from framework import TensorSamples, samplers
from framework.errors import ConfigError

LABELS = torch.tensor([0] * 90 + [1] * 10)


def order_of(sampler, *, batch_size=8):
    return sampler.order(torch.Generator().manual_seed(1), batch_size=batch_size)


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        (TensorDataset(LABELS), 0),
        (TensorSamples(LABELS), -1),
        (Subset(TensorSamples(LABELS.flip(0), rows=torch.arange(99, -1, -1)), range(100)), 0),
        (TensorDataset(LABELS), ["often"] * 90 + ["rare"] * 10),
    ],
)
def test_classes_are_balanced_wherever_labels_come_from(dataset, labels):
    order = order_of(samplers.BalancedSampler(dataset, labels, num_samples=4000))
    assert len(order) == 4000
    assert 0.45 < (order >= 90).double().mean() < 0.55


def test_batches_have_samples_of_similar_length_each_once():
    lengths = torch.arange(100).roll(37)
    order = order_of(samplers.LengthSampler(TensorDataset(lengths), lengths))
    assert sorted(order.tolist()) == list(range(100))
    spread = [int(lengths[batch].max() - lengths[batch].min()) for batch in order[:96].split(8)]
    assert max(spread) < 16


def test_a_mixture_repeats_only_exhausted_datasets():
    parts: Any = ConcatDataset([TensorDataset(torch.zeros(size)) for size in (10, 100)])
    order = order_of(samplers.MixtureSampler(parts, [1, 1], num_samples=40))
    few = order[order < 10]
    assert len(order) == 40
    assert few.bincount().max() - few.bincount(minlength=10).min() <= 1
    assert len(order[order >= 10].unique()) == 40 - len(few)


DATA = TensorDataset(torch.zeros(3))
EMPTY = TensorDataset(torch.zeros(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplers.WeightedRandomSampler(DATA, [1, 2]), "2 weights for 3 samples"),
        (lambda: samplers.WeightedRandomSampler(DATA, [1, -2, 1]), "not negative"),
        (lambda: samplers.WeightedRandomSampler(DATA, [0, 0, 0]), "some above 0"),
        (lambda: samplers.MixtureSampler(ConcatDataset([DATA, EMPTY]), [1, 1]), "dataset 1 has no samples"),
        (lambda: samplers.MixtureSampler(ConcatDataset([DATA, DATA]), [1]), "1 weights for 2 datasets"),
        (lambda: samplers.MixtureSampler(ConcatDataset([DATA, DATA]), [1, 1], 0), "num_samples=0"),
        (lambda: samplers.LengthSampler(DATA, [1]), r"shape \(1,\) for 3 samples"),
    ],
)
def test_what_cant_be_drawn_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_empty_dataset_of_weight_0_is_skipped():
    order = order_of(samplers.MixtureSampler(ConcatDataset([EMPTY, DATA]), [0, 1]))
    assert sorted(order.tolist()) == [0, 1, 2]


def test_beyond_the_limit_of_multinomial_samples_are_drawn_by_their_weights():
    size = 2**24 + 5
    weights = torch.zeros(size, dtype=torch.float64)
    # The first and the last have none, so that rounding must not lead to them.
    heavy = torch.tensor([1, 2**23, size - 2])
    weights[heavy] = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    data: Any = range(size)
    order = order_of(samplers.WeightedRandomSampler(data, weights, 80_000))
    assert order.dtype == torch.int64
    numbers = torch.stack([(order == index).sum() for index in heavy])
    assert int(numbers.sum()) == 80_000
    assert (numbers / 10_000 - torch.tensor([1, 2, 5])).abs().max() < 0.05
    assert torch.equal(order, order_of(samplers.WeightedRandomSampler(data, weights, 80_000)))

    once = samplers.WeightedRandomSampler(data, weights, 3, replacement=False)
    firsts = [0] * 3
    for seed in range(3):
        drawn = once.order(torch.Generator().manual_seed(seed), batch_size=1)
        assert sorted(drawn.tolist()) == heavy.tolist()
        firsts[heavy.tolist().index(int(drawn[0]))] += 1
    assert firsts[2] >= firsts[0]


def test_below_the_limit_torch_draws(monkeypatch):
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    data: Any = range(1000)
    for replacement in (True, False):
        order = order_of(samplers.WeightedRandomSampler(data, weights, 500, replacement))
        generator = torch.Generator().manual_seed(1)
        assert torch.equal(order, torch.multinomial(weights.double(), 500, replacement, generator=generator))
