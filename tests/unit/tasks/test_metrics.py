"""Metrics as sums and counts, on the device; the classes that are predicted."""

from __future__ import annotations

import pytest
import torch

from framework.errors import ConfigError, DataError
from framework.tasks import Accuracy, Classes, MeanAbsoluteError

SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.3, 0.1, 0.6], [0.2, 0.5, 0.3]])


@pytest.mark.parametrize(
    ("metric", "target", "hits", "count"),
    [
        (Accuracy(), [1, 0, 2, 0], 3, 4),
        (Accuracy(), [0, 1, 0, 2], 0, 4),
        (Accuracy(top_k=2), [2, 2, 0, 0], 3, 4),
        # The model predicts the ignored class once.
        (Accuracy(ignore_index=0), [1, 0, 2, 0], 2, 2),
        (Accuracy(top_k=2, ignore_index=0), [1, 0, 0, 0], 1, 1),
    ],
)
def test_accuracy_counts_targets_among_the_best(metric, target, hits, count):
    total, of = metric(SCORES, torch.tensor(target))
    assert (int(total), int(of)) == (hits, count)


@pytest.mark.parametrize("top_k", [1, 2])
def test_accuracy_of_images_counts_pixels(top_k):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 3, 4, generator=generator)
    target = torch.randint(5, (2, 3, 4), generator=generator)
    total, count = Accuracy(top_k=top_k)(scores, target)
    assert count == 24
    assert total.item() == Accuracy(top_k=top_k)(scores.permute(0, 2, 3, 1).reshape(-1, 5), target.flatten())[0].item()


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
    assert (float(total), int(count)) == (7.0, 4)
    few = MeanAbsoluteError(ignore_index=-1)
    total, count = few(torch.tensor([1.0, torch.inf, 5.0]), torch.tensor([0.0, -1.0, 2.0]))
    assert (float(total), int(count)) == (4.0, 2)


def test_mean_absolute_error_refuses_to_broadcast():
    total, count = MeanAbsoluteError()(torch.ones(5000, dtype=torch.bfloat16), torch.zeros(5000, dtype=torch.bfloat16))
    assert (total.dtype, total.item(), count) == (torch.float32, 5000.0, 5000)
    with pytest.raises(DataError, match=r"\(4, 1\) and targets of shape \(4,\)"):
        MeanAbsoluteError()(torch.zeros(4, 1), torch.zeros(4))


def test_predictions_are_in_single_precision():
    found = Classes()(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0 + torch.log(torch.tensor(2.0)), -100.0]]))
    assert torch.equal(found["class"], torch.tensor([1, 1]))
    torch.testing.assert_close(found["probability"], torch.tensor([0.66524094, 2 / 3]))
    scores = torch.randn(50, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(Classes()(scores)["probability"], scores.double().softmax(dim=1).amax(dim=1).float())
    with pytest.raises(DataError, match=r"\(3, 4, 5\)(.|\n)*task\.predictions=null"):
        Classes()(torch.zeros(3, 4, 5))
