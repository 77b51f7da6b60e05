from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from framework.errors import ConfigError, DataError
from framework.tasks import Accuracy, MeanAbsoluteError, Supervised
from framework.types import StepOutput, Task

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)


@pytest.fixture
def classification():
    return Supervised(loss=nn.CrossEntropyLoss(), metrics={"accuracy": Accuracy()})


def summed(output: StepOutput, name: str) -> tuple[torch.Tensor, torch.Tensor | int]:
    total, count = output.metrics[name]
    assert isinstance(total, torch.Tensor)
    return total, count


def test_training_gives_the_mean_loss_and_validation_the_metrics(classification, model):
    assert isinstance(classification, Task)
    output = classification.training_step(model, [X, LABELS])
    assert output.loss.equal(nn.functional.cross_entropy(model(X), LABELS))
    assert output.loss.requires_grad
    assert (output.num_samples, output.metrics) == (12, {})
    total, count = summed(classification.validation_step(model, [X, LABELS]), "accuracy")
    assert (total.item(), int(count)) == ((model(X).argmax(dim=1) == LABELS).sum().item(), 12)


@pytest.mark.parametrize(
    ("loss", "metric", "ignored"),
    [
        (nn.CrossEntropyLoss(), Accuracy(), -100),  # torch's default
        (nn.CrossEntropyLoss(ignore_index=0), Accuracy(), 0),
        (nn.CrossEntropyLoss(ignore_index=0), Accuracy(ignore_index=1), 1),
        (nn.functional.cross_entropy, Accuracy(), None),
    ],
)
def test_metrics_ignore_what_the_loss_ignores(model, loss, metric, ignored):
    labels = LABELS.clone()
    labels[:3] = 0 if ignored is None else ignored
    task = Supervised(loss=loss, metrics={"accuracy": metric})
    total, count = summed(task.validation_step(model, [X, labels]), "accuracy")
    kept = torch.ones(12, dtype=torch.bool) if ignored is None else labels != ignored
    assert int(count) == kept.sum()
    assert total.item() == (model(X).argmax(dim=1) == labels)[kept].sum()


def test_metrics_in_training_only_when_asked_and_without_graph(model):
    task = Supervised(loss=nn.L1Loss(), metrics={"mae": MeanAbsoluteError()}, train_metrics=True)
    output = task.training_step(model, (X, torch.zeros(12, 3)))
    total, count = summed(output, "mae")
    assert total.item() / count == pytest.approx(output.loss.item())
    assert not total.requires_grad
    assert output.loss.requires_grad


@pytest.mark.parametrize("form", [tuple, list, lambda pair: {"input": pair[0], "target": pair[1]}])
def test_forms_of_a_batch(classification, model, form):
    output = classification.training_step(model, form((X, LABELS)))
    assert output.loss.equal(classification.training_step(model, [X, LABELS]).loss)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (X, r"a tensor of shape \(12, 6\)"),
        ((X, LABELS, X), "a tuple of 3"),
        ({"image": X, "label": LABELS}, r"keys \['image', 'label'\]"),
        ("ab", "a str"),
        ((X, [1, 2]), "target that is a list of 2"),
        ((X, torch.tensor(1)), r"target that is a tensor of shape \(\)"),
    ],
)
def test_other_forms_are_refused(classification, model, batch, said):
    with pytest.raises(DataError, match=said):
        classification.training_step(model, batch)


def test_what_is_no_mean_loss_is_refused(model):
    for reduction in ("sum", "none"):
        with pytest.raises(ConfigError, match=f"CrossEntropyLoss has reduction='{reduction}'. Use reduction='mean'"):
            Supervised(loss=nn.CrossEntropyLoss(reduction=reduction))
    with pytest.raises(ConfigError, match=r"shape \(12, 3\)"):
        Supervised(loss=lambda output, target: (output - target).abs()).training_step(model, (X, torch.zeros(12, 3)))
    with pytest.raises(ConfigError, match="called 'loss'"):
        Supervised(loss=nn.MSELoss(), metrics={"loss": MeanAbsoluteError()})


def test_target_and_loss_follow_the_output_to_its_device():
    class EndsElsewhere(nn.Module):
        def forward(self, x):
            return x.to("meta")

    loss = nn.BCEWithLogitsLoss(pos_weight=torch.ones(6))
    output = Supervised(loss).training_step(EndsElsewhere(), (X, torch.zeros(12, 6)))
    assert output.loss.device.type == "meta"
    assert loss.pos_weight is not None
    assert loss.pos_weight.device.type == "meta"


def test_a_step_reads_nothing_from_the_device():
    """The meta device has no values: anything that waits for one raises."""
    task = Supervised(loss=nn.MSELoss(), metrics={"mae": MeanAbsoluteError()}, train_metrics=True)
    model = nn.Linear(6, 3, device="meta")
    batch = (torch.zeros(4, 6, device="meta"), torch.zeros(4, 3, device="meta"))
    for step in (task.training_step, task.validation_step):
        output = step(model, batch)
        assert summed(output, "mae")[0].device.type == output.loss.device.type == "meta"


@pytest.mark.parametrize("cuts", [(0, 12), (0, 6, 12), (0, 1, 8, 12)])
def test_means_weighed_by_their_counts_give_the_gradient_of_the_whole(classification, model, cuts):
    whole = copy.deepcopy(model)
    classification.training_step(whole, (X, LABELS)).loss.backward()
    for begin, end in pairwise(cuts):
        output = classification.training_step(model, (X[begin:end], LABELS[begin:end]))
        (output.loss * (output.num_samples / 12)).backward()
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)
