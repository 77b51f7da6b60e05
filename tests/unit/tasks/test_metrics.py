from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError, DataError
from framework.tasks import Accuracy, MeanAbsoluteError

SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.3, 0.1, 0.6], [0.2, 0.5, 0.3]])


@pytest.mark.parametrize(
    ("top_k", "target", "hits"),
    [(1, [1, 0, 2, 1], 4), (1, [1, 0, 2, 0], 3), (1, [0, 1, 0, 2], 0), (2, [2, 2, 0, 0], 3), (3, [0, 1, 2, 0], 4)],
)
def test_accuracy_counts_targets_among_the_best(top_k, target, hits):
    total, count = Accuracy(top_k=top_k)(SCORES, torch.tensor(target))
    assert (total.item(), count) == (hits, 4)


@pytest.mark.parametrize("top_k", [1, 2])
def test_accuracy_of_images_counts_pixels(top_k):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 3, 4, generator=generator)
    target = torch.randint(5, (2, 3, 4), generator=generator)
    flat = scores.permute(0, 2, 3, 1).reshape(-1, 5)
    total, count = Accuracy(top_k=top_k)(scores, target)
    assert count == 24
    assert total.item() == Accuracy(top_k=top_k)(flat, target.flatten())[0].item() > 0


@given(cut=st.integers(1, 30))
def test_parts_add_up_to_the_whole(cut):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(31, 4, generator=generator)
    target = torch.randint(4, (31,), generator=generator)
    whole, parts = (
        Accuracy()(scores, target),
        [Accuracy()(scores[:cut], target[:cut]), Accuracy()(scores[cut:], target[cut:])],
    )
    assert sum(total.item() for total, _ in parts) == whole[0].item()
    assert sum(count for _, count in parts) == whole[1]


@pytest.mark.parametrize(
    ("scores", "target"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.zeros(4)),
    ],
)
def test_accuracy_refuses_what_it_would_compare_wrongly(scores, target):
    with pytest.raises(DataError, match="class indices"):
        Accuracy()(scores, target)


def test_top_k_must_fit():
    with pytest.raises(ConfigError, match="top_k=0"):
        Accuracy(top_k=0)
    with pytest.raises(ConfigError, match="top_k=4, but the model gives 3 classes"):
        Accuracy(top_k=4)(SCORES, torch.zeros(4, dtype=torch.int64))


def test_mean_absolute_error_is_over_elements():
    total, count = MeanAbsoluteError()(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.tensor([[0.0, 2.0], [0.0, 1.0]]))
    assert (total.item(), count) == (7.0, 4)


def test_mean_absolute_error_adds_half_precision_in_single():
    total, count = MeanAbsoluteError()(torch.ones(5000, dtype=torch.bfloat16), torch.zeros(5000, dtype=torch.bfloat16))
    assert (total.dtype, total.item(), count) == (torch.float32, 5000.0, 5000)


def test_mean_absolute_error_refuses_to_broadcast():
    with pytest.raises(DataError, match=r"\(4, 1\) and targets of shape \(4,\)"):
        MeanAbsoluteError()(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("top_k", [1, 2])
def test_accuracy_leaves_ignored_targets_out_of_sum_and_count(top_k):
    """Also where the ignored value is a class that the model predicts."""
    for ignored, target in ((-100, [1, -100, 2, 0]), (0, [1, 0, 2, 0])):
        kept = torch.tensor(target) != ignored
        expected = Accuracy(top_k)(SCORES[kept], torch.tensor(target)[kept])
        total, count = Accuracy(top_k, ignore_index=ignored)(SCORES, torch.tensor(target))
        assert (int(total), int(count)) == (int(expected[0]), expected[1])


def test_mean_absolute_error_leaves_ignored_targets_out():
    output, target = torch.tensor([1.0, torch.inf, 5.0]), torch.tensor([0.0, -1.0, 2.0])
    total, count = MeanAbsoluteError(ignore_index=-1)(output, target)
    assert (float(total), int(count)) == (4.0, 2)


@pytest.mark.parametrize("metric", [Accuracy(), Accuracy(top_k=2), Accuracy(ignore_index=0)])
def test_sums_stay_on_the_device(own_state, metric):
    """The meta device has no values: reading one would raise."""
    total, count = metric(torch.zeros(4, 3, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
    assert (total.device.type, total.shape) == ("meta", ())
    assert count == 4 if metric.ignore_index is None else count.device.type == "meta"
